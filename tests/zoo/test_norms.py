"""The reported spectral norms of a model's heads match norms computed from its actual queries and keys."""

import copy

import pytest
import torch
from tests.zoo import census
from tests.zoo.norm_truth import NORMS, NotRecordableError, reported_norms, true_norms
from tests.zoo.running import time_limit

from foreshock.monitor import attach

SAMPLED_MODELS = (
    "transformers llama",
    "transformers llama, num_key_value_heads=1",
    "transformers gpt2",
    "transformers gpt_bigcode",
    "transformers gpt_bigcode, multi_query=False",
    "transformers falcon",
    "transformers falcon, multi_query=False",
    "transformers falcon, new_decoder_architecture=True, num_kv_heads=2",
    "transformers gpt_neox",
    "transformers phi3",
    "transformers qwen3",
    "transformers gemma2",
    "transformers whisper",
    "transformers vit",
    "transformers bart",
    "transformers deepseek_v3, q_lora_rank=None",
    "transformers inkling_text",
    "transformers ctrl",
    "transformers granite_speech_encoder",
    "litgpt GPT",
    "litgpt GPT with grouped heads",
    "torchtune llama3",
    "timm vit_tiny_patch16_224",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize(
            "name", census.names() if metafunc.config.getoption("--tier") == "long" else SAMPLED_MODELS
        )


@pytest.mark.filterwarnings("ignore")
def test_reported_spectral_norms_match_brute_force_norms(name: str) -> None:
    if name not in census.entries():
        pytest.skip(f"{name.split()[0]} is not installed: pip install '.[zoo]'")
    entry = census.entry(name)
    with time_limit(300):
        model = entry.build().eval()
        given = entry.cases(model)[0].given
        unattached = copy.deepcopy(model)
        modules = dict(unattached.named_modules())
        names = {id(module): path for path, module in model.named_modules()}
        try:
            with attach(model, url=None, quiet=True, attention="keep") as agent:
                with torch.no_grad():
                    model(**given)
                reported = list(reported_norms(model, agent))
        except ValueError as error:
            pytest.skip(f"attach rejects it: {str(error)[:100]}")
        for layer, module, holders, norms in reported:
            try:
                own_holders = [modules[names[id(holder)]] for holder in holders]
                expected = true_norms(unattached, given, modules[names[id(module)]], own_holders)
            except NotRecordableError:  # the queries of some layers cannot be recorded
                continue
            for norm in NORMS:
                torch.testing.assert_close(
                    norms[norm].double(), expected[norm], rtol=2e-3, atol=0, msg=f"{layer}, {norm}"
                )
