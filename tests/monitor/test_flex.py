"""FlexAttention stays native and is sampled; the reference computes score by score."""

import inspect
import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.probing import assert_counts, reference_statistics
from tests.monitor.tiny_models import CausalSelfAttention, tiny_gpt, train_step
from tests.monitor.watched_training import listening, train
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LENGTH, HEADS = 12, 2
SLOPES = torch.tensor([0.5, 0.1])
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 9 + [2]])
TABLE = torch.randn(2, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))
LEARNED = nn.Parameter(TABLE.clone())


@pytest.fixture(autouse=True)
def backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes the check by which PyTorch refuses to train FlexAttention on a CPU; uncompiled it works."""
    monkeypatch.setattr(flex, "_validate_device", lambda *operands: None)
    with torch.random.fork_rng():
        yield


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - SLOPES[h] * (q - k).abs()


def softcapped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(score / 0.3) * 0.3


def learned(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + LEARNED[b, h, q, k]


def table_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + TABLE[b][h][q][k]  # chained indices, as in transformers


def scored_mask(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q >= k, score, -float("inf"))


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (q >= k)


def window_of_one_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ((h == 0) | (q - k < 3))


def padded_rows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q >= 2 * b)


def blocks(mask_mod: Any, **options: Any) -> BlockMask:
    mask_options: dict[str, Any] = {
        "B": 2,
        "H": HEADS,
        "Q_LEN": LENGTH,
        "KV_LEN": LENGTH,
        "device": "cpu",
        "BLOCK_SIZE": 4,
    }
    return create_block_mask(mask_mod, **{**mask_options, **options})


CASES: dict[str, tuple[Any, Any, Any]] = {
    "nothing": (None, None, None),
    "alibi": (alibi, lambda: blocks(causal, B=None, H=None, BLOCK_SIZE=128), causal),
    "softcap": (softcapped, lambda: blocks(window_of_one_head), window_of_one_head),
    "learned bias": (learned, None, None),
    "table": (table_bias, lambda: blocks(causal), causal),
    "documents": (None, lambda: blocks(document, H=None), document),
    "mask in the scores": (scored_mask, None, causal),
    "rows without visible keys": (alibi, lambda: blocks(padded_rows, H=None), padded_rows),
}


class Flex(CausalSelfAttention):
    """FlexAttention that records its last queries and keys."""

    case = "alibi"

    def __init__(self) -> None:
        super().__init__(16, HEADS)
        score_mod, block_mask, _ = CASES[self.case]
        self.options: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask and block_mask()}

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return flex_attention(query, key, value, **self.options)

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.last = query.detach().double(), key.detach().double()
        out: Tensor = self.attend(query, key, value)
        return out


def scores(layer: Flex, mask_mod: Any) -> Tensor:
    """Scores in float64, computed one by one, minus what score_mod adds to all keys of a row; -inf if hidden."""
    (query, key), score_mod = layer.last, layer.options["score_mod"]
    found = torch.full((len(query), HEADS, LENGTH, LENGTH), -math.inf, dtype=torch.float64)
    added_to_all_keys = torch.full_like(found, -math.inf)
    for place in itertools.product(*map(range, found.shape)):
        entry, head, row, column = place
        where = tuple(torch.tensor(x, dtype=torch.int32) for x in place)
        score = (query[entry, head, row] @ key[entry, head, column]) / math.sqrt(query.shape[3])
        if mask_mod is None or mask_mod(*where):
            found[place] = score if score_mod is None else score_mod(score, *where).detach()
            added_to_all_keys[place] = 0.0 if score_mod is None else score_mod(torch.zeros_like(score), *where).detach()
    return found - added_to_all_keys.amax(-1, keepdim=True).nan_to_num(neginf=0.0)


def counted(sample: wire.Sample, slot: Slot) -> Any:
    words = sample.words()
    assert words is not None
    return slot_values(words, slot)


COMPARED_SLOTS = (
    Slot.ROWS,
    Slot.EMPTY_ROWS,
    Slot.SCORE_MAX,
    Slot.ROW_MAX_ABS,
    Slot.SCORE_OFFSET_SUM,
    Slot.SCORE_OFFSET_SUMSQ,
)


def trained(
    model: Any, steps: int = 2, watched: bool = True, **overrides: Any
) -> tuple[list[Tensor], list[wire.Sample]]:
    """The weights after some steps and the samples; `model` may be compiled."""
    samples: list[wire.Sample] = []
    if not watched:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            train_step(model, optimizer, step)
    else:
        options: dict[str, Any] = {"attention": "keep", "probe_rows": 10**6, **overrides}
        with listening(getattr(model, "_orig_mod", model), **options) as (agent, listener):
            train(agent, model, steps)
        samples = listener.of(wire.Sample)
    return [p.detach().clone() for p in model.parameters()], samples


def gpt(kind: type[Flex], case: str) -> nn.Module:
    kind.case = case
    torch.manual_seed(4)
    return tiny_gpt(kind(), kind(), seed=4)


def assert_equals_reference(model: Any, sample: wire.Sample) -> None:
    for number, layer in enumerate(model.blocks):
        words = sample.words()
        assert words is not None
        expected = reference_statistics(scores(layer, CASES[layer.case][2]))
        assert_counts(words[number * HEADS : (number + 1) * HEADS], expected, 2e-5, *COMPARED_SLOTS)


def same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


@pytest.mark.execution("FlexAttention", "keep")
@pytest.mark.parametrize("case", CASES)
def test_flex_rows_equal_the_reference_and_training_is_bit_identical(case: str) -> None:
    unwatched, _ = trained(gpt(Flex, case), watched=False)
    weights, samples = trained(model := gpt(Flex, case))
    assert same_bits(weights, unwatched)
    assert_equals_reference(model, samples[-1])


compiled: dict[str, Any] = {}


def compiled_flex(**options: Any) -> CompileCounterWithBackend:
    """Stores torch.compile(flex_attention) in `compiled`; returns the counter of its graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled_function = torch.compile(flex_attention, backend=counter, **options)
    compiled["flex"] = partial(compiled_function, kernel_options={"BLOCK_M": 32})
    return counter


class UsesCompiledFlex(Flex):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return compiled["flex"](query, key, value, **self.options)


def test_compiled_flex_attention_is_watched_without_recompiling() -> None:
    counter = compiled_flex(fullgraph=True)
    unwatched, _ = trained(gpt(UsesCompiledFlex, "alibi"), watched=False)
    graphs = counter.frame_count
    _, samples = trained(model := gpt(UsesCompiledFlex, "alibi"), 4, sample_every_steps=2)
    assert_equals_reference(model, samples[-1])
    repeated, _ = trained(gpt(UsesCompiledFlex, "alibi"), watched=False)
    assert counter.frame_count == graphs == 1
    assert same_bits(unwatched, repeated)
    compiled_flex(fullgraph=True)
    assert same_bits(
        trained(gpt(UsesCompiledFlex, "alibi"))[0], unwatched
    )  # the first compilation happens while watched


@pytest.mark.execution("FlexAttention", "torch.compile")
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.full) for c in ("table", "documents")])
def test_compiled_model_is_bit_identical_with_one_more_graph_for_sampled_steps(case: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    unwatched, _ = trained(torch.compile(gpt(Flex, case), backend=counter, fullgraph=True), 4, watched=False)
    assert counter.frame_count == 1
    eager = trained(gpt(Flex, case), 4, sample_every_steps=2)[1]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = torch.compile(gpt(Flex, case), backend=counter, fullgraph=True)
    weights, samples = trained(model, 4, sample_every_steps=2)
    assert counter.frame_count == 2
    assert same_bits(weights, unwatched)
    for one, other in zip(samples, eager, strict=True):
        for slot in Slot:
            np.testing.assert_allclose(
                counted(one, slot), counted(other, slot), rtol=1e-4, atol=2e-5, err_msg=slot.name
            )
    assert counted(samples[-1], Slot.ROWS).tolist() == [2 * LENGTH] * 4


@pytest.mark.parametrize(
    "reentrant",
    [
        pytest.param(True, marks=pytest.mark.execution("FlexAttention", "checkpointing (reentrant)")),
        pytest.param(False, marks=pytest.mark.execution("FlexAttention", "checkpointing (non-reentrant)")),
    ],
)
def test_recomputed_flex_attention_counts_once(reentrant: bool) -> None:
    class Recomputed(Flex):
        def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
            return checkpoint(super().attend, query, key, value, use_reentrant=reentrant)

    unwatched, _ = trained(gpt(Recomputed, "alibi"), watched=False)
    weights, samples = trained(model := gpt(Recomputed, "alibi"))
    assert same_bits(weights, unwatched)
    assert_equals_reference(model, samples[-1])


class ReturnsLse(Flex):
    """Uses the log-sum-exp in the loss, like attention with sinks."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        out, aux = flex_attention(query, key, value, **self.options, return_aux=flex.AuxRequest(lse=True))
        assert isinstance(aux, flex.AuxOutput)
        assert aux.lse is not None
        assert aux.max_scores is None
        return out * torch.sigmoid(aux.lse).unsqueeze(-1)


def test_auxiliary_outputs_are_passed_through() -> None:
    unwatched, _ = trained(gpt(ReturnsLse, "alibi"), watched=False)
    weights, samples = trained(model := gpt(ReturnsLse, "alibi"))
    assert same_bits(weights, unwatched)
    assert_equals_reference(model, samples[-1])


def fails_uncompiled(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        raise ValueError("unsupported here")
    return score


def test_score_mod_that_fails_on_single_rows_leaves_the_call_unmeasured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    CASES["failing"] = (fails_uncompiled, None, None)
    try:
        unwatched, _ = trained(gpt(Flex, "failing"), watched=False)
        weights, samples = trained(gpt(Flex, "failing"))
    finally:
        del CASES["failing"]
    assert same_bits(weights, unwatched)
    assert not counted(samples[-1], Slot.ROWS).any()
    assert (
        "blocks.0 is not watched in this call: its score_mod or mask_mod cannot be computed on single rows"
        in caplog.text
    )
    assert "ValueError: unsupported here" in caplog.text


def test_flex_attention_keeps_its_signature_and_is_restored_on_close() -> None:
    code, signature = flex_attention.__code__, inspect.signature(flex_attention)
    with attach(gpt(Flex, "alibi"), **EVERY_STEP), attach(gpt(Flex, "alibi"), **EVERY_STEP):
        assert inspect.signature(flex_attention) == signature
        assert flex_attention.__code__ is not code
        ones = torch.ones(1, 1, 3, 8)
        torch.testing.assert_close(flex_attention(ones, ones, ones), ones)
    assert flex_attention.__code__ is code
    assert not [name for name in vars(flex) if "foreshock" in name]
