"""Every model of the zoo is the same with foreshock under it, and what foreshock does not see of it is named."""

import warnings

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

FULL = (
    "transformers deberta-v2",
    "transformers xglm",
    "transformers siglip_vision_model",
    "transformers falcon",
    "transformers llama",
    "transformers mistral",
    "transformers phimoe",
    "transformers gpt_neox",
    "transformers opt",
    "transformers qwen3",
    "transformers mixtral",
    "transformers modernbert",
    "transformers bart",
    "transformers t5",
    "transformers bigbird_pegasus",
    "transformers marian",
    "transformers dinov2",
    "transformers clip_text_model",
    "transformers dinov3_vit",
    "transformers stablelm",
    "transformers olmo2",
    "transformers granite",
)
"""Others of each way, for the full tier; the long tier examines all that live in the zoo."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        long = metafunc.config.getoption("--tier") == "long"
        spread = [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)]
        metafunc.parametrize("name", census.names() if long else spread)


@pytest.fixture(autouse=True)
def _their_warnings_are_theirs() -> None:
    warnings.simplefilter("ignore")


def test_a_model_is_the_same_with_foreshock_under_it_and_no_attention_goes_unseen(name: str) -> None:
    with at_most(300):
        record = examine(census.entry(name))
    assert not record.wrong, "\n".join((name, *record.wrong))


def test_the_spread_lives_in_the_zoo() -> None:
    spread = {*QUICK, *FULL}
    assert spread <= set(census.names())
    assert len(spread) == len(QUICK) + len(FULL) == 30


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
