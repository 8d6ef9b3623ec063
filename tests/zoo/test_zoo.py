"""Every model of the zoo is the same with foreshock under it, and what foreshock does not see of it is named."""

import warnings
from dataclasses import replace

import pytest
from tests.zoo import census
from tests.zoo.judge import examine
from tests.zoo.running import TookTooLongError, at_most

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
"""One of each way to write attention, and of those the quickest: separate and fused projections, rotary, ALiBi, soft
caps, sinks, grouped and single keys, encoders, pictures, and a decoder that looks at an encoder."""

IN_ONE_CASE = {
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
"""Others of each way, and the case in which the quick tier examines each; the full tier takes every case, and the long
tier examines all that live in the zoo."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        tier = metafunc.config.getoption("--tier")
        names = census.names() if tier == "long" else [*QUICK, *IN_ONE_CASE]
        whole: dict[str, str] = {} if tier == "quick" else dict.fromkeys(IN_ONE_CASE, "every")
        metafunc.parametrize(("name", "case"), [(n, (IN_ONE_CASE | whole).get(n, "every")) for n in names])


@pytest.fixture(autouse=True)
def _their_warnings_are_theirs() -> None:
    warnings.simplefilter("ignore")


def test_a_model_is_the_same_with_foreshock_under_it_and_no_attention_goes_unseen(name: str, case: str) -> None:
    entry = census.entry(name)
    if case != "every":
        every = entry.cases
        entry = replace(entry, cases=lambda model: [each for each in every(model) if each.name == case])
    with at_most(300):
        record = examine(entry)
    assert not record.wrong, "\n".join((name, *record.wrong))


def test_the_spread_lives_in_the_zoo() -> None:
    spread = {*QUICK, *IN_ONE_CASE}
    assert spread <= set(census.names())
    assert len(spread) == len(QUICK) + len(IN_ONE_CASE) == 35


def test_a_model_type_that_cannot_be_built_is_listed_and_one_that_can_is_not(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--tier") != "long":
        pytest.skip("the long tier tries every model type that is listed as impossible to build")
    built = []
    for model_type in census.UNBUILT:
        try:
            with at_most(30):
                census.run_once(model_type)
        except (Exception, TookTooLongError):  # whatever it is, it cannot be built
            continue
        built.append(model_type)
    assert not built, f"{built} can be built now: take them out of unbuilt.json"
