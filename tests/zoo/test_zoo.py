"""foreshock does not change the models of the zoo, and measures or reports all their attention."""

import warnings
from dataclasses import replace

import pytest
from tests.zoo import census
from tests.zoo.judge import examine
from tests.zoo.running import TimeLimitExceededError, time_limit

QUICK = (
    "transformers gpt2",
    "transformers gemma2",
    "transformers gpt_oss",
    "transformers gpt_bigcode",
    "transformers bloom",
    "transformers bert",
    "transformers vit",
    "transformers whisper",
)
"""The fastest model for each implementation of attention: separate and fused projections, rotary, ALiBi, soft caps,
sinks, grouped and single keys, encoders, images, and cross-attention."""

ONE_CASE = {
    "transformers deberta-v2": "padded inside",
    "transformers xglm": "padded left",
    "transformers siglip_vision_model": "unpadded",
    "transformers falcon": "unpadded",
    "transformers llama": "unpadded",
    "transformers mistral": "padded inside",
    "transformers phimoe": "unpadded",
    "transformers gpt_neox": "padded left",
    "transformers opt": "unpadded",
    "transformers qwen3": "padded right",
    "transformers mixtral": "unpadded",
    "transformers modernbert": "padded inside",
    "transformers bart": "padded right",
    "transformers t5": "padded left",
    "transformers bigbird_pegasus": "unpadded",
    "transformers marian": "padded inside",
    "transformers dinov2": "unpadded",
    "transformers clip_text_model": "padded right",
    "transformers dinov3_vit": "unpadded",
    "transformers stablelm": "unpadded",
    "transformers olmo2": "padded inside",
    "transformers granite": "unpadded",
    "transformers nllb-moe": "padded right",
    "transformers pegasus_x": "padded right",
    "transformers deepseek_v32": "unpadded",
    "transformers deepseek_v4": "unpadded",
    "transformers mimo_v2_flash": "unpadded",
}
"""More models for each implementation, and the case that the quick tier examines. The full tier examines every case,
and the long tier every model of the zoo."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        tier = metafunc.config.getoption("--tier")
        names = census.names() if tier == "long" else [*QUICK, *ONE_CASE]
        all_cases: dict[str, str] = {} if tier == "quick" else dict.fromkeys(ONE_CASE, "every")
        metafunc.parametrize(("name", "case"), [(n, (ONE_CASE | all_cases).get(n, "every")) for n in names])


@pytest.fixture(autouse=True)
def ignore_warnings_of_libraries() -> None:
    warnings.simplefilter("ignore")


def test_model_is_unchanged_by_foreshock_and_all_attention_is_reported(name: str, case: str) -> None:
    entry = census.entry(name)
    if case != "every":
        cases = entry.cases
        entry = replace(entry, cases=lambda model: [one_case for one_case in cases(model) if one_case.name == case])
    with time_limit(300):
        record = examine(entry)
    assert not record.wrong, "\n".join((name, *record.wrong))


def test_sampled_models_exist_in_the_zoo() -> None:
    sampled = {*QUICK, *ONE_CASE}
    assert sampled <= set(census.names())
    assert len(sampled) == len(QUICK) + len(ONE_CASE) == 35


def test_unbuilt_model_types_still_cannot_be_built(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--tier") != "long":
        pytest.skip("the long tier tries every model type in unbuilt.json")
    built = []
    for model_type in census.UNBUILT:
        try:
            with time_limit(30):
                census.run_once(model_type)
        except (Exception, TimeLimitExceededError):  # any error means that it cannot be built
            continue
        built.append(model_type)
    assert not built, f"{built} can be built now: remove them from unbuilt.json"
