"""Models in all execution modes: training is bit-identical and each row is counted once."""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.execution_modes import (
    EVERY_STEP,
    MODELS,
    MODES,
    STEPS,
    Logits,
    Mode,
    TrainingResult,
    train_unwatched,
    train_watched,
    train_with_operator,
)
from tests.monitor.probing import counted_rows
from tests.monitor.tiny_models import CausalSelfAttention, Checkpoint, TinyGPT, batch, tiny_gpt, train_step
from tests.monitor.transformers_models import TRANSFORMERS, X
from tests.monitor.watched_training import listening
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foreshock.contract.slots import COUNT_SLOTS, Slot
from foreshock.monitor import attach

EVERY_ROW: dict[str, Any] = {"probe_rows": 10**6}
NATIVE_ONLY = ("Mistral", "Gemma2")
"""Models that stay native: their windows are masks for SDPA, and Gemma's softcap needs its own eager attention."""
SLOW = ("torch.compile", "inductor", "selective checkpointing")


def cases(attention: str) -> Iterator[Any]:
    """Every model in every mode; the quick tier trains all with native attention and compiles only nanoGPT."""
    for model in MODELS:
        for name, kinds in MODES.items():
            if (name == "inductor" and model != "nanoGPT") or (name == SLOW[2] and model in TRANSFORMERS):
                continue  # compiling each model takes long
            quick = attention == "keep" and (name == "eager" or (model not in TRANSFORMERS and name not in SLOW))
            quick |= (attention, model, name) == ("keep", "nanoGPT", "torch.compile")
            marks = [pytest.mark.execution(model, name if attention == "kernels" else "keep")]
            for number, mode in enumerate(kinds):
                label = f"{model}, {name}{number or ''}, {attention}"
                yield pytest.param(
                    attention, model, mode, id=label, marks=marks if quick else [*marks, pytest.mark.full]
                )


@functools.cache
def eager(model: str, dtype: torch.dtype, autocast: bool, micro_batches: int) -> TrainingResult:
    """The counters that every mode must reproduce."""
    mode = Mode(dtype=dtype, autocast=autocast, micro_batches=micro_batches)
    return train_watched(MODELS[model][0](mode), mode.loop, **EVERY_ROW)


@pytest.mark.parametrize(("attention", "model", "mode"), [*cases("keep"), *cases("kernels")])
def test_execution_mode_is_bit_identical_and_counts_each_row_once(attention: str, model: str, mode: Mode) -> None:
    make, heads, rows = MODELS[model]
    # transformers models compile to the bits of eager mode; using eager mode saves a compilation
    plain_mode = replace(mode, compile=None) if model in TRANSFORMERS else mode
    expected = (train_unwatched if attention == "keep" or model in NATIVE_ONLY else train_with_operator)(
        make(mode), plain_mode.loop
    )
    torch._dynamo.reset()
    result = train_watched(make(mode), mode.loop, **EVERY_ROW, attention=attention)
    result.assert_same_bits(expected)
    assert result.rows == [rows * mode.micro_batches * STEPS] * heads
    if mode.compile is None and attention == "kernels":  # a compiler may round differently around the operator
        plain = eager(model, mode.dtype, mode.autocast, mode.micro_batches)
        forward = [*COUNT_SLOTS, Slot.SCORE_MAX, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ]
        np.testing.assert_array_equal(result.words[0][:, forward], plain.words[0][:, forward])


@pytest.mark.execution("nanoGPT", "torch.compile")
def test_first_compilation_after_attach_counts_every_row() -> None:
    torch._dynamo.trace_rules.get_torch_obj_rule_map.cache_clear()  # as in a process without earlier compilations
    mode = MODES["torch.compile"][0]
    assert train_watched(MODELS["nanoGPT"][0](mode), mode.loop).rows == [24 * STEPS] * 4


LENGTHS = (12, 9, 11, 7)


@pytest.mark.full
@pytest.mark.parametrize(("model", "attention"), [("nanoGPT", "keep"), ("nanoGPT", "kernels"), ("Llama", "keep")])
def test_dynamic_graph_handles_several_lengths_and_counts_each_row_once(model: str, attention: str) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def loop(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        running: Any = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step, length in enumerate(LENGTHS):
            losses.append(train_step(running, optimizer, step, batch(step)[:, :length]).detach())
            stepped(losses[-1])
        return losses

    make = MODELS[model][0]
    expected = (train_with_operator if attention == "kernels" else train_unwatched)(make(Mode()), loop)
    unwatched_graphs = len(graphs)
    torch._dynamo.reset()
    graphs.clear()
    result = train_watched(make(Mode()), loop, **EVERY_ROW, attention=attention)
    result.assert_same_bits(expected)
    assert len(graphs) == unwatched_graphs < len(LENGTHS)
    assert [set(words[:, Slot.ROWS].tolist()) for words in result.words] == [{2 * length} for length in LENGTHS]


class CrossAttention(nn.Module):
    """Cross attention to a padded source with other widths."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.cross = nn.MultiheadAttention(18, 3, kdim=11, vdim=7, batch_first=True, dropout=dropout)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor, source: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.cross(x, source[..., :11], source[..., 11:], key_padding_mask=padding, need_weights=False)[0]
        return x + out


@pytest.mark.full
@pytest.mark.parametrize(("dropout", "dynamic", "lengths"), [(0.0, None, (9, 9)), (0.2, True, (9, 6))])
def test_compiled_multihead_attention_with_padding_is_bit_identical_in_one_graph(
    dropout: float, dynamic: bool | None, lengths: tuple[int, ...]
) -> None:
    def loop(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        running: Any = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step, length in enumerate(lengths):
            torch.manual_seed(step)
            x, source = torch.randn(2, 5, 18), torch.randn(2, length, 18)
            padding = torch.arange(length).expand(2, -1) >= torch.tensor([[length], [length - 2]])
            losses.append(running(x, source, padding).square().mean())
            torch.autograd.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
            stepped(losses[-1].detach())
        return losses

    expected = train_unwatched(CrossAttention(dropout), loop)
    torch._dynamo.reset()
    result = train_watched(CrossAttention(dropout), loop, attention="keep")
    result.assert_same_bits(expected)
    assert min(result.rows) > 0


def test_wrong_padding_mask_raises_pytorchs_error_and_its_check_is_restored() -> None:
    check = F._check_key_padding_mask  # type: ignore[attr-defined]
    model, messages = CrossAttention(0.0), []
    for around in (nullcontext(), attach(model, **EVERY_STEP)):
        with around, pytest.raises((AssertionError, RuntimeError)) as refused:
            model(torch.randn(2, 5, 18), torch.randn(2, 9, 18), torch.zeros(2, 4, dtype=torch.bool))
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
    assert F._check_key_padding_mask is check  # type: ignore[attr-defined]


CHECKPOINTS: dict[str, Checkpoint] = {
    "non-reentrant": lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=False),
    "reentrant": lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=True),
    "reentrant, in a partial": functools.partial(checkpoint, use_reentrant=True),
}
PLACES = ("attention only", "both")


def checkpointed(place: str = "", kind: Checkpoint | None = None) -> TinyGPT:
    """Two layers with fixed weights, checkpointed at `place`."""
    torch.manual_seed(3)
    inner, outer = (kind if place in (location, "both") else None for location in ("attention only", "blocks"))
    return tiny_gpt(*(CausalSelfAttention(16, 2, checkpoint=inner) for _ in range(2)), checkpoint=outer)


def train_with_kernels(model: TinyGPT, mode: Mode | None = None) -> TrainingResult:
    return train_watched(model, (mode or Mode()).loop, numerics="kernel")


def assert_same(result: TrainingResult) -> None:
    plain = train_with_kernels(checkpointed())
    result.assert_same_bits(plain)
    np.testing.assert_array_equal(result.words, plain.words)


# PyTorch warns about nested reentrant checkpoints, with or without foreshock
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.execution("nanoGPT", "checkpoint around attention")
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("place", PLACES)
def test_recompute_counts_once_and_is_bit_identical(place: str, kind: str) -> None:
    assert_same(train_with_kernels(checkpointed(place, CHECKPOINTS[kind])))


@pytest.mark.full
@pytest.mark.execution("nanoGPT", "checkpoint around attention")
@pytest.mark.parametrize("place", PLACES)
def test_compiled_recompute_counts_once_and_is_bit_identical(place: str) -> None:
    assert_same(train_with_kernels(checkpointed(place, CHECKPOINTS["non-reentrant"]), MODES["torch.compile"][0]))


class CustomCheckpoint(torch.autograd.Function):
    """Activation checkpointing that does not use PyTorch's implementation."""

    @staticmethod
    def forward(ctx: Any, function: Any, *tensors: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        with torch.no_grad():
            result: Tensor = function(*tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        torch.autograd.backward(out, gradients)
        return None, *(t.grad for t in inputs)


def test_custom_recompute_of_attention_is_reported_and_training_stays_accurate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    result, plain = (
        train_with_kernels(checkpointed("attention only", CustomCheckpoint.apply)),
        train_with_kernels(checkpointed()),
    )
    for found, plain_value in zip(result.losses + result.weights, plain.losses + plain.weights, strict=True):
        torch.testing.assert_close(found, plain_value, rtol=0, atol=2**-8)  # only one of the passes rounds O to bf16
    assert sum("attention is recomputed in a backward" in each for each in caplog.messages) == 1


def test_custom_checkpoint_around_blocks_counts_once_and_is_bit_identical() -> None:
    assert_same(train_with_kernels(checkpointed("blocks", CustomCheckpoint.apply)))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_packed_sequences_are_not_treated_as_one_sequence(compiled: bool) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    expected = Logits("Llama", Mode()).model(input_ids=batch(0), position_ids=positions).logits
    model: Any = Logits("Llama", Mode())
    agent = attach(model, **EVERY_STEP)
    run: Any = torch.compile(model.model, backend="aot_eager") if compiled else model.model
    run(input_ids=batch(0))  # first a batch that is not packed
    result = [run(input_ids=batch(0), position_ids=positions).logits]
    if not compiled:
        result.append(run(batch(0), None, positions).logits)
    agent.close()
    for logits in result:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "recommended"), [("Llama", True), ("Gemma2", False)])
def test_sdpa_is_recommended_only_if_it_computes_the_same_attention(name: str, recommended: bool) -> None:
    model: Any = TRANSFORMERS[name]()
    model.set_attn_implementation("eager")
    with attach(model, **EVERY_STEP) as agent:
        model(batch(0), labels=batch(0)).loss.backward()
        agent.step()
        agent.step()
        report = agent.report()
    assert "its attention is eager, which stays" in report
    assert ("set_attn_implementation('sdpa') lets kernels compute it" in report) == recommended


def test_custom_kernel_registered_with_transformers_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def custom_kernel(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        calls.append(type(mask))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS["custom"] = custom_kernel
    try:
        model: Any = TRANSFORMERS["GPT-2"]()
        model.set_attn_implementation("custom")
        with listening(model, attention="keep", probe_rows=10**6) as (agent, listener):
            model(X).logits.square().mean().backward()
            agent.step()
    finally:
        del ALL_ATTENTION_FUNCTIONS["custom"]
    assert calls == [type(None)] * 2
    assert counted_rows(listener) == [[12] * 8]
    assert "outside" not in caplog.text
