"""`foreshock diagnose` on models as people have them: what is wrong is found with its place, and nothing else is."""

import math
import re

import pytest
import torch
from tests.cli.typed import foreshock
from tests.lab.patients import left_padded
from tests.lab.planted import Attention, called

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import flash_attention
from foreshock.kernels.flash_attention.statistics import new_state
from foreshock.lab.diagnosis.calls import measured
from foreshock.lab.diagnosis.examination import examine, of_factory
from foreshock.monitor import attach

_ATTENTION = "first in the forward: the output of the attention of layer"
_GRADIENT = "first in the backward, the gradient of model.layers"
FOUND = {
    "eager_overflows": rf"{_ATTENTION} 1 \(model.layers.1.self_attn\), head 2 of 4, is not .*: "
    r"query times key reaches 90\d\d\d before the scale, and float16 ends at 65504",
    "rows_without_a_key": rf"{_ATTENTION} 0 \(model.layers.0.self_attn\), all 4 heads, .*: these rows see no key",
    "overflowing_mlp": r"in the forward, after the attention of layer 1: what enters model.layers.1.mlp.down_proj is",
    "hurt_keys": rf"{_GRADIENT}.2.self_attn.k_proj.weight is not finite",
    "hurt_frozen": rf"{_GRADIENT}.1.mlp",
    "hurt_output": r"in the backward, the gradient of model.layers.3.self_attn.o_proj.weight",
    "hurt_queries": r"in the backward, in the attention of layer 2 \(3, head 1 of 2: the gradient of its query is not",
    "left_padded": r"48 of 144 rows of layer 0 head 0 see no key, and so in 3 of 3 layers",
    "large_scores": r"layer 1 head 2 moved as a whole, by \+22\d\d\d.\d nats. .* score of 22\d\d\d by 17\d nats",
    "negative_scores": r"the scores of layer 1 head 2 moved as a whole, by -12\d.\d nats",
    "peaked": r"Attention is nearly one-hot in 12 of 12 heads: their entropy is 0.\d\d nats",
    "attention_with_weights": r"in the forward, before any attention: what enters out is not finite",
    "by_hand": r"was not judged: none of its layers was measured.*\n.*it computes its attention by hand",
    "partly_trained": r"^Verdict: Not this rounding: .* of 12 heads in 3 layers",
}


@pytest.mark.parametrize("build", FOUND)
def test_what_is_wrong_with_a_model_is_found_with_its_place(build: str) -> None:
    said = foreshock("diagnose", f"tests.lab.patients:{build}", "--batches", "2")
    assert said.exit_code == 0, said.output
    assert re.search(FOUND[build], said.output), said.output


@pytest.mark.parametrize("build", ["eager", "packed", "sliding", "adapted_without_padding", "checkpointed"])
def test_a_sound_model_has_no_finding_and_all_its_heads_are_judged(build: str) -> None:
    said = foreshock("diagnose", f"tests.lab.patients:{build}", "--batches", "2")
    assert said.exit_code == 0, said.output
    assert said.output.startswith("Verdict: Not this rounding: no head has large scores"), said.output
    assert "of 12 heads in 3 layers" in said.output
    assert "Also" not in said.output
    assert "Note" not in said.output


def test_layers_of_adapters_under_a_mask_are_judged_like_any_other() -> None:
    examined = of_factory("tests.lab.patients:adapted", None, 2)
    assert [(head.layer, head.head) for head in examined.heads] == [
        (layer, head) for layer in range(3) for head in range(4)
    ]
    assert all({"offset", "shift", "largest", "output error"} <= head.cells.keys() for head in examined.heads)


def test_a_diagnosis_changes_neither_weights_nor_buffers() -> None:
    model, loss = left_padded()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with attach(model, url=None, spool_directory=None, quiet=True):
        examine("here", model, loss, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_is_measured_of_a_call_is_what_the_agent_counts() -> None:
    call, _ = called(Attention())
    state = new_state(2)
    query, key, value = (x.detach().requires_grad_() for x in call.given[2:5])
    out = flash_attention(query, key, value, causal="top_left", numerics="kernel", state=state)
    out.sum().backward()  # type: ignore[no-untyped-call]
    sums, rows = state.view(torch.float64), state[:, Slot.ROWS]
    found = measured(call)
    assert found["offset"] == pytest.approx((sums[:, Slot.SCORE_OFFSET_SUM] / rows).numpy(), rel=0.01)
    scores = (query.double() @ key.double().mT).detach() / math.sqrt(query.shape[-1])
    largest = scores.tril().abs().amax((0, 2, 3))
    assert found["largest"] == pytest.approx(largest.numpy(), rel=0.02)
    assert found["output error"] == pytest.approx([0.0, 0.0], abs=0.02)
    assert (found["output error"] > 0).all()
