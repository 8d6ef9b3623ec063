"""Every model of the zoo is the same with foreshock under it, and what foreshock does not see of it is named."""

import warnings

import pytest
from tests.zoo import census
from tests.zoo.judge import examine
from tests.zoo.running import TookTooLongError, at_most

SPREAD = (
    "transformers gpt2",
    "transformers llama",
    "transformers mistral",
    "transformers gemma2",
    "transformers gpt_oss",
    "transformers phimoe",
    "transformers gpt_bigcode",
    "transformers gpt_neox",
    "transformers falcon",
    "transformers bloom",
    "transformers opt",
    "transformers qwen3",
    "transformers mixtral",
    "transformers bert",
    "transformers modernbert",
    "transformers deberta-v2",
    "transformers bart",
    "transformers t5",
    "transformers bigbird_pegasus",
    "transformers marian",
    "transformers vit",
    "transformers dinov2",
    "transformers clip_text_model",
    "transformers siglip_vision_model",
    "transformers dinov3_vit",
    "transformers whisper",
    "transformers stablelm",
    "transformers olmo2",
    "transformers granite",
    "transformers xglm",
)
"""One or two of each way to write attention; the long tier examines all."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        long = metafunc.config.getoption("--tier") == "long"
        metafunc.parametrize("name", census.names() if long else SPREAD)


@pytest.fixture(autouse=True)
def _their_warnings_are_theirs() -> None:
    warnings.simplefilter("ignore")


def test_a_model_is_the_same_with_foreshock_under_it_and_no_attention_goes_unseen(name: str) -> None:
    with at_most(300):
        record = examine(census.entry(name))
    assert not record.wrong, "\n".join((name, *record.wrong))


def test_the_spread_lives_in_the_zoo() -> None:
    assert set(SPREAD) <= set(census.names())
    assert len(SPREAD) == 30


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
