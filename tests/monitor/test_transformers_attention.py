"""Models of transformers compute what they compute without us: padded, packed, compiled, with any implementation."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.executions import EVERY_STEP, Logits, Mode
from tests.monitor.probing import counted_rows
from tests.monitor.tiny_models import batch
from tests.monitor.transformers_models import DECODER, TRANSFORMERS, X, tiny
from tests.monitor.watching import listening
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foreshock.monitor import attach

QUIET: dict[str, Any] = {"quiet": True, "url": None, "strict": True}


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


PACKED = torch.cat([torch.arange(5), torch.arange(7)])[None]


def models() -> tuple[Any, Any]:
    """Without a cache: with one, transformers looks for no packed sequences."""
    return tiny("Llama", **DECODER, use_cache=False), tiny("Llama", **DECODER, use_cache=False)


def while_it_runs(model: nn.Module, action: Callable[[], object]) -> None:
    """Lets `model` do `action` in its forward, before its first layer and before its mask is asked for again."""
    first: nn.Module = model.model.layers[0]  # type: ignore[union-attr, index, assignment]

    def hook(*_: object) -> None:
        action()

    first.register_forward_pre_hook(hook)


def in_another_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


@pytest.mark.parametrize("both_watched", [False, True])
@pytest.mark.parametrize("around", [lambda action: action(), in_another_thread], ids=["inside it", "in another thread"])
def test_sequences_packed_for_another_model_while_one_runs_stay_apart(around: Any, both_watched: bool) -> None:
    student, teacher = models()
    expected = teacher(X, position_ids=PACKED).logits
    torch.testing.assert_close(expected[:, 5:], teacher(X[:, 5:]).logits, rtol=1e-4, atol=1e-5)
    seen: list[Tensor] = []
    run = teacher.model.forward if both_watched else teacher.forward  # without the hooks of the whole model

    def teach() -> None:
        out = run(X, position_ids=PACKED)
        seen.append(teacher.lm_head(out.last_hidden_state) if both_watched else out.logits)

    while_it_runs(student, lambda: around(teach))
    with attach(student, attention="kernels", **QUIET), torch.no_grad():
        if both_watched:
            with attach(teacher, attention="kernels", **QUIET):
                student(X)
        else:
            student(X)
    torch.testing.assert_close(seen, [expected], rtol=1e-4, atol=1e-5)


class InterruptedError(BaseException):
    """As KeyboardInterrupt, which leaves a forward without its hooks."""


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_sequences_packed_after_a_forward_was_interrupted_stay_apart(compiled: bool) -> None:
    student, teacher = models()
    expected = teacher(X, position_ids=PACKED).logits

    def interrupt() -> None:
        raise InterruptedError

    while_it_runs(student, interrupt)
    with attach(student, attention="kernels", **QUIET), torch.no_grad():
        with pytest.raises(InterruptedError):
            student(X)
        run: Any = torch.compile(teacher, backend="aot_eager") if compiled else teacher
        torch.testing.assert_close(run(X, position_ids=PACKED).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("args", "named"),
    [
        pytest.param((), {"input_ids": X}, id="by name"),
        pytest.param((), {"input_ids": X, "position_ids": PACKED}, id="packed, by name"),
        pytest.param((X, None, PACKED), {}, id="packed, by place"),
    ],
)
def test_a_model_compiled_whole_for_lengths_that_change_has_the_graphs_and_positions_it_has_without_us(
    args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    # Hooks of the outermost model are traced one by one, and a number in them would be a symbol, in a graph of its own.
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    student = tiny("Llama", **DECODER | {"num_hidden_layers": 1}, use_cache=False)
    run: Any = torch.compile(student, backend=backend, dynamic=True)
    with torch.no_grad():
        expected, without_us = run(*args, **named).logits, len(graphs)
        graphs.clear()
        torch._dynamo.reset()
        with attach(student, attention="kernels", **QUIET):
            torch.testing.assert_close(run(*args, **named).logits, expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) == without_us
