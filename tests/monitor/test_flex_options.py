"""FlexAttention as transformers calls it, and a call that asks for the largest score of each row."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import CausalSelfAttention, tiny_gpt, train_step
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import flex_attention as integration

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach
from foreshock.monitor.attention import interception as watching
from foreshock.monitor.attention import probe

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def llama(attention: str, watched: bool = True) -> tuple[list[Tensor], list[wire.Sample]]:
    """Weights of a padded training of two steps, and its samples."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=32, attn_implementation=attention, **sizes)
    model: Any = LlamaForCausalLM(config)
    optimizer, listener = torch.optim.SGD(model.parameters(), lr=0.1), Listener()
    ids = torch.randint(48, (2, 24), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    real[0, :5] = 0

    def step() -> Tensor:
        loss: Tensor = model(ids, attention_mask=real, labels=ids).loss
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if watched:
        with attach(model, **{**EVERY_STEP, "attention": "keep", "probe_rows": 10**6}) as agent:
            agent.subscribe(listener)
            for _ in range(2):
                agent.step(step())
    else:
        for _ in range(2):
            step()
    return [p.detach().clone() for p in model.parameters()], listener.of(wire.Sample)


@pytest.mark.full
@pytest.mark.execution("FlexAttention", "keep")
def test_flex_attention_of_transformers_keeps_its_bits_and_counts_as_its_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *operands: None)  # which refuses to train on a CPU
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # as code generation does
    monkeypatch.setattr(integration.WrappedFlexAttention, "_instance", None)
    unwatched, _ = llama("flex_attention", watched=False)
    weights, samples = llama("flex_attention")
    assert all(map(torch.equal, weights, unwatched))
    for one, other in zip(samples, llama("sdpa")[1], strict=True):
        for slot in (Slot.ROWS, Slot.EMPTY_ROWS, Slot.SCORE_MAX, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
            words, expected = one.words(), other.words()
            assert words is not None
            assert expected is not None
            assert slot_values(words, Slot.ROWS).tolist() == [24 + 19] * 8
            np.testing.assert_allclose(
                slot_values(words, slot), slot_values(expected, slot), rtol=1e-4, atol=1e-5, err_msg=slot.name
            )


class AsksForTheLargest(CausalSelfAttention):
    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, aux = flex_attention(query, key, value, return_aux=AuxRequest(max_scores=True))
        assert aux.max_scores is not None
        return out


def with_largest(query: Tensor, key: Tensor, value: Tensor, *options: Any, return_aux: AuxRequest) -> Any:
    """PyTorch gives them on GPUs alone; one row that sees nothing, and a largest score that no other row has."""
    assert return_aux.max_scores
    scores = query @ key.mT / query.shape[3] ** 0.5
    largest = scores.amax(-1).detach()
    largest[0, 0, 0], largest[0, 1, 0] = -float("inf"), -77.0
    return scores.softmax(-1) @ value, AuxOutput(lse=None, max_scores=largest)


def test_the_largest_score_is_that_of_every_row_of_a_call_that_asks_for_it_and_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, listener, largest, above = tiny_gpt(AsksForTheLargest(16, 2), seed=1), Listener(), [], 1000.0

    def noted(*operands: Any, **options: Any) -> Any:
        out, aux = with_largest(*operands, **options)
        largest.append(aux.max_scores + above)
        return out, aux._replace(max_scores=largest[-1])

    with attach(model, **{**EVERY_STEP, "attention": "keep", "probe_rows": 1}) as agent:
        agent.subscribe(listener)
        monkeypatch.setattr(watching._Rebound, "own", staticmethod(noted))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            above = 1000.0
            model(torch.zeros(1, 12, dtype=torch.int64))  # a forward without a backward tells nothing
            above = 0.0
            agent.step(train_step(model, optimizer, step))
    for sample, rows in zip(listener.of(wire.Sample), largest[1::2], strict=True):
        words, finite = sample.words(), rows.nan_to_num(neginf=0.0)
        assert words is not None
        np.testing.assert_allclose(slot_values(words, Slot.SCORE_MAX), rows.amax((0, 2)), rtol=1e-6)
        np.testing.assert_allclose(slot_values(words, Slot.ROW_MAX_ABS), finite.abs().amax((0, 2)), rtol=1e-6)
        assert slot_values(words, Slot.ROWS).tolist() == [1, 1]


class Shifted(CausalSelfAttention):
    """Gives its scores to a function."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = flex_attention(query, key, value, score_mod=lambda score, b, h, q, k: score + (q >= k))
        return out


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_a_probe_that_fails_between_a_forward_and_its_recompute_leaves_the_training_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no memory for it")

    monkeypatch.setattr(flex, "_validate_device", lambda *operands: None)
    monkeypatch.setattr(probe, "measure", failing)
    torch.manual_seed(0)
    layers = Shifted(16, 2), Shifted(16, 2)
    model = tiny_gpt(*layers, checkpoint=partial(checkpoint, use_reentrant=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, **{**EVERY_STEP, "attention": "keep", "strict": False}) as agent:
        for step in range(3):
            agent.step(train_step(model, optimizer, step))
        assert agent.faults["probe"] == 1
    assert caplog.text.count("the probe is off from now on") == 1
