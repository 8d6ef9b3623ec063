"""Models of transformers are trained as people train them, watched, and recorded so that they can be scored."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.texts import Corpus
from foreshock.lab.training import library_models as module

VOCABULARY = 300
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers")


@pytest.mark.parametrize("name", module.MODELS)
def test_each_model_trains_and_all_its_heads_are_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    text = Corpus(torch.randint(VOCABULARY, (10_000,), generator=generator, dtype=torch.int32), "0" * 64, "made up")
    digits = tmp_path / "digits.npz"
    np.savez(digits, images=np.eye(28, dtype=np.uint8)[None].repeat(20, 0) * 255, labels=np.arange(20) % 10)
    whole = module.MODELS[name]
    fewer = dict.fromkeys(LAYERS, 1) | {"vocab_size": VOCABULARY}
    fields: dict[str, Any] = whole.fields | {field: few for field, few in fewer.items() if field in whole.fields}
    monkeypatch.setattr(module, "_VOCABULARY", VOCABULARY)
    small = replace(whole, fields=fields, batch=2, length=128, warmup_steps=2)
    monkeypatch.setitem(module.MODELS, name, small)
    monkeypatch.setattr(module, "read_text", lambda _: text)

    module.main(name, tmp_path, seed=2, steps=3, digits=digits)

    (path,) = tmp_path.glob("*.jsonl.gz")
    trace = read_trace(path)
    attentions = 3 if "decoder_layers" in fields else 1
    heads = fields.get("num_attention_heads", 8)
    assert (trace.header["recipe"], trace.header["seed"]) == (f"library-{name}", 2)
    assert trace.heads == [(layer, head) for layer in range(attentions) for head in range(heads)]
    assert np.isfinite(trace.steps.loss).tolist() == [True] * 3


@pytest.mark.parametrize(("name", "sentence"), [("bert", "allowed are pythia-160m"), ("vit", "give --digits")])
def test_a_name_or_images_that_are_missing_are_said(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        module.Run(name, 1)
