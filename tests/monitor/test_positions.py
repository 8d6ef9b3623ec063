"""A watched model that counts its own positions tells nothing of any other model: theirs may be packed."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.test_foreign_models import DECODER, QUIET, X, tiny
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach

PACKED = torch.cat([torch.arange(5), torch.arange(7)])[None]


@pytest.fixture(autouse=True)
def _the_compiler_starts_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def models() -> tuple[Any, Any]:
    """Without a cache, beside which nobody looks for packed sequences."""
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


@pytest.mark.full
def test_sequences_packed_for_a_model_that_one_graph_holds_with_a_watched_one_stay_apart() -> None:
    student, teacher = models()
    expected = teacher(X, position_ids=PACKED).logits
    seen: list[Tensor] = []
    while_it_runs(student, lambda: seen.append(teacher(X, position_ids=PACKED).logits))
    with attach(student, attention="kernels", **QUIET), torch.no_grad():
        run: Any = torch.compile(student, backend="aot_eager", fullgraph=True)
        run(X)
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
def test_a_model_that_is_compiled_whole_and_counts_its_own_positions_is_served_by_kernels() -> None:
    student, _ = models()
    listener = Listener()
    often: dict[str, Any] = {"sample_every_steps": 1, "sample_every_seconds": 0.0, "probe_rows": 5}
    with attach(student, attention="kernels", **QUIET, **often) as agent:
        agent.subscribe(listener)
        run: Any = torch.compile(student, backend="aot_eager", fullgraph=True)
        torch.autograd.backward(run(X).logits.square().mean())
        agent.step(1.0)
    counted = [slot_values(sample.words(), Slot.ROWS).tolist() for sample in listener.of(wire.Sample)]
    assert counted == [[12] * 8]  # a probe counts five


@pytest.mark.full
@pytest.mark.parametrize(
    ("args", "named"),
    [
        pytest.param((), {"input_ids": X}, id="by name"),
        pytest.param((), {"input_ids": X, "position_ids": PACKED}, id="packed, by name", marks=pytest.mark.full),
        pytest.param((X, None, PACKED), {}, id="packed, by place", marks=pytest.mark.full),
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
