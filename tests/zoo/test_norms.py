"""The norms that foreshock reports of a model's heads are those of what its queries and keys really are."""

import copy

import pytest
import torch
from tests.zoo import census
from tests.zoo.norm_truth import NORMS, NoTruthError, reported_norms, true_norms
from tests.zoo.running import at_most

from foreshock.monitor import attach

SPREAD = (
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
        metafunc.parametrize("name", census.names() if metafunc.config.getoption("--tier") == "long" else SPREAD)


@pytest.mark.filterwarnings("ignore")
def test_every_norm_that_is_reported_is_the_true_one(name: str) -> None:
    if name not in census.entries():
        pytest.skip(f"{name.split()[0]} is not installed: pip install '.[zoo]'")
    entry = census.entry(name)
    with at_most(300):
        model = entry.build().eval()
        given = entry.cases(model)[0].given
        untouched = copy.deepcopy(model)
        modules = dict(untouched.named_modules())
        names = {id(module): path for path, module in model.named_modules()}
        try:
            with attach(model, url=None, quiet=True, attention="keep") as agent:
                with torch.no_grad():
                    model(**given)
                reported = list(reported_norms(model, agent))
        except ValueError as refusal:
            pytest.skip(f"attach refuses it: {str(refusal)[:100]}")
        for layer, module, holders, norms in reported:
            try:
                own = [modules[names[id(holder)]] for holder in holders]
                true = true_norms(untouched, given, modules[names[id(module)]], own)
            except NoTruthError:  # not every layer can be made to show its queries
                continue
            for norm in NORMS:
                torch.testing.assert_close(norms[norm].double(), true[norm], rtol=2e-3, atol=0, msg=f"{layer}, {norm}")
