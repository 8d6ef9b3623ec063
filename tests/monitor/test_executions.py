"""Models in modes of execution and of transformers: not a bit changes, and each row counts once on every backend."""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.executions import EVERY_STEP, MODELS, MODES, STEPS, Logits, Mode, Trained, alone, unwatched, watched
from tests.monitor.probing import counted_rows
from tests.monitor.tiny_models import CausalSelfAttention, Checkpoint, TinyGPT, batch, tiny_gpt, train_step
from tests.monitor.transformers_models import TRANSFORMERS, X
from tests.monitor.watching import listening
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foreshock.contract.slots import COUNT_SLOTS, Slot
from foreshock.monitor import attach

EVERY_ROW: dict[str, Any] = {"probe_rows": 10**6}
KEPT = ("Mistral", "Gemma2")
"""Their windows are a mask to PyTorch's attention, and Gemma's softcap is computed by its own eager attention."""
SLOW = ("torch.compile", "inductor", "selective checkpointing")


def cases(attention: str) -> Iterator[Any]:
    """Every model in every mode; the quick tier trains them all with their own attention, and compiles nanoGPT."""
    for model in MODELS:
        for name, kinds in MODES.items():
            if (name == "inductor" and model != "nanoGPT") or (name == SLOW[2] and model in TRANSFORMERS):
                continue  # a compiler run for each takes long
            quick = attention == "keep" and (name == "eager" or (model not in TRANSFORMERS and name not in SLOW))
            quick |= (attention, model, name) == ("keep", "nanoGPT", "torch.compile")
            marks = [pytest.mark.execution(model, name if attention == "kernels" else "keep")]
            for number, mode in enumerate(kinds):
                label = f"{model}, {name}{number or ''}, {attention}"
                yield pytest.param(
                    attention, model, mode, id=label, marks=marks if quick else [*marks, pytest.mark.full]
                )


@functools.cache
def eager(model: str, dtype: torch.dtype, autocast: bool, micro_batches: int) -> Trained:
    """The counts that every mode must come to."""
    mode = Mode(dtype=dtype, autocast=autocast, micro_batches=micro_batches)
    return watched(MODELS[model][0](mode), mode.loop, **EVERY_ROW)


@pytest.mark.parametrize(("attention", "model", "mode"), [*cases("keep"), *cases("kernels")])
def test_a_mode_of_execution_changes_no_bit_and_each_row_counts_once(attention: str, model: str, mode: Mode) -> None:
    make, heads, rows = MODELS[model]
    # models of transformers compile to the bits of eager mode, which spares half of the compiler's time
    plain_mode = replace(mode, compile=None) if model in TRANSFORMERS else mode
    expected = (unwatched if attention == "keep" or model in KEPT else alone)(make(mode), plain_mode.loop)
    torch._dynamo.reset()
    got = watched(make(mode), mode.loop, **EVERY_ROW, attention=attention)
    got.assert_same_bits(expected)
    assert got.rows == [rows * mode.micro_batches * STEPS] * heads
    if mode.compile is None and attention == "kernels":  # a compiler may round what surrounds the operator otherwise
        plain = eager(model, mode.dtype, mode.autocast, mode.micro_batches)
        forward = [*COUNT_SLOTS, Slot.SCORE_MAX, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ]
        np.testing.assert_array_equal(got.words[0][:, forward], plain.words[0][:, forward])


@pytest.mark.execution("nanoGPT", "torch.compile")
def test_a_compiler_that_has_not_looked_pytorchs_functions_up_before_attach_takes_none_of_ours_for_them() -> None:
    torch._dynamo.trace_rules.get_torch_obj_rule_map.cache_clear()  # as in a process that has compiled nothing yet
    mode = MODES["torch.compile"][0]
    assert watched(MODELS["nanoGPT"][0](mode), mode.loop).rows == [24 * STEPS] * 4


LENGTHS = (12, 9, 11, 7)


@pytest.mark.full
@pytest.mark.parametrize(("model", "attention"), [("nanoGPT", "keep"), ("nanoGPT", "kernels"), ("Llama", "keep")])
def test_a_graph_serves_several_lengths_and_counts_each_row_once(model: str, attention: str) -> None:
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
    expected = (alone if attention == "kernels" else unwatched)(make(Mode()), loop)
    without_us = len(graphs)
    torch._dynamo.reset()
    graphs.clear()
    got = watched(make(Mode()), loop, **EVERY_ROW, attention=attention)
    got.assert_same_bits(expected)
    assert len(graphs) == without_us < len(LENGTHS)
    assert [set(words[:, Slot.ROWS].tolist()) for words in got.words] == [{2 * length} for length in LENGTHS]


class Reader(nn.Module):
    """Reads a source of other widths than its own, of which some tokens are padding."""

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
def test_a_multihead_attention_that_is_told_of_padding_stays_one_graph_and_computes_what_it_computes_unwatched(
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

    expected = unwatched(Reader(dropout), loop)
    torch._dynamo.reset()
    got = watched(Reader(dropout), loop, attention="keep")
    got.assert_same_bits(expected)
    assert min(got.rows) > 0


def test_a_padding_mask_of_another_shape_is_refused_in_pytorchs_words_and_its_check_is_given_back() -> None:
    check = F._check_key_padding_mask  # type: ignore[attr-defined]
    model, words = Reader(0.0), []
    for around in (nullcontext(), attach(model, **EVERY_STEP)):
        with around, pytest.raises((AssertionError, RuntimeError)) as refused:
            model(torch.randn(2, 5, 18), torch.randn(2, 9, 18), torch.zeros(2, 4, dtype=torch.bool))
        words.append(str(refused.value))
    assert words[0] == words[1]
    assert F._check_key_padding_mask is check  # type: ignore[attr-defined]


KINDS: dict[str, Checkpoint] = {
    "non-reentrant": lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=False),
    "reentrant": lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=True),
    "held in a partial, reentrant": functools.partial(checkpoint, use_reentrant=True),
}
PLACES = ("attention alone", "both")


def checkpointed(place: str = "", kind: Checkpoint | None = None) -> TinyGPT:
    """Two layers whose weights are always the same, checkpointed at `place`."""
    torch.manual_seed(3)
    inner, outer = (kind if place in (where, "both") else None for where in ("attention alone", "blocks"))
    return tiny_gpt(*(CausalSelfAttention(16, 2, checkpoint=inner) for _ in range(2)), checkpoint=outer)


def trained(model: TinyGPT, mode: Mode | None = None) -> Trained:
    return watched(model, (mode or Mode()).loop, numerics="kernel")


def assert_same(got: Trained) -> None:
    plain = trained(checkpointed())
    got.assert_same_bits(plain)
    np.testing.assert_array_equal(got.words, plain.words)


# PyTorch itself warns of a reentrant checkpoint within a reentrant one, with or without foreshock
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.execution("nanoGPT", "checkpoint around attention")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_recompute_counts_once_on_its_own_layer_and_changes_no_bit(place: str, kind: str) -> None:
    assert_same(trained(checkpointed(place, KINDS[kind])))


@pytest.mark.full
@pytest.mark.execution("nanoGPT", "checkpoint around attention")
@pytest.mark.parametrize("place", PLACES)
def test_a_compiled_recompute_counts_once_on_its_own_layer(place: str) -> None:
    assert_same(trained(checkpointed(place, KINDS["non-reentrant"]), MODES["torch.compile"][0]))


class SomebodyElses(torch.autograd.Function):
    """A checkpoint that is not PyTorch's."""

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


def test_a_recompute_whose_layer_is_not_known_trains_on_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    got, plain = trained(checkpointed("attention alone", SomebodyElses.apply)), trained(checkpointed())
    for ours, theirs in zip(got.losses + got.weights, plain.losses + plain.weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-8)  # O is rounded to bf16 in one of the passes alone
    assert sum("attention is recomputed in a backward" in each for each in caplog.messages) == 1


def test_somebody_elses_checkpoint_round_whole_blocks_works() -> None:
    assert_same(trained(checkpointed("blocks", SomebodyElses.apply)))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_sequences_packed_by_position_numbers_are_never_taken_for_one(compiled: bool) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    expected = Logits("Llama", Mode()).model(input_ids=batch(0), position_ids=positions).logits
    model: Any = Logits("Llama", Mode())
    agent = attach(model, **EVERY_STEP)
    run: Any = torch.compile(model.model, backend="aot_eager") if compiled else model.model
    run(input_ids=batch(0))  # one that is not packed comes before
    got = [run(input_ids=batch(0), position_ids=positions).logits]
    if not compiled:
        got.append(run(batch(0), None, positions).logits)
    agent.close()
    for logits in got:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "advised"), [("Llama", True), ("Gemma2", False)])
def test_an_implementation_is_advised_only_where_it_computes_the_same_attention(name: str, advised: bool) -> None:
    model: Any = TRANSFORMERS[name]()
    model.set_attn_implementation("eager")
    with attach(model, **EVERY_STEP) as agent:
        model(batch(0), labels=batch(0)).loss.backward()
        agent.step()
        agent.step()
        report = agent.report()
    assert "its attention is eager, which stays" in report
    assert ("set_attn_implementation('sdpa') lets kernels compute it" in report) == advised


def test_any_kernel_that_transformers_knows_by_name_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def somebodys_kernel(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        calls.append(type(mask))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS["somebodys"] = somebodys_kernel
    try:
        model: Any = TRANSFORMERS["GPT-2"]()
        model.set_attn_implementation("somebodys")
        with listening(model, attention="keep", probe_rows=10**6) as (agent, listener):
            model(X).logits.square().mean().backward()
            agent.step()
    finally:
        del ALL_ATTENTION_FUNCTIONS["somebodys"]
    assert calls == [type(None)] * 2
    assert counted_rows(listener) == [[12] * 8]
    assert "outside" not in caplog.text
