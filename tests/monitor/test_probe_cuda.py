"""`attention="keep"` on a GPU: bits, counts, CUDA graphs and no host synchronisation; the kernels against PyTorch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.executions import EVERY_STEP, Loop, watched
from tests.monitor.test_cuda import LENGTH, ROWS, STEPS, captured, eager, model, reduce_overhead
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import Agent, attach

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run it on one with tests/monitor"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    # PyTorch's own advice, and what it calls of its own that is on its way out
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

KEEP: dict[str, Any] = {"attention": "keep", "probe_rows": 8}
LOOPS = [
    pytest.param(eager, marks=pytest.mark.execution("nanoGPT", "keep")),
    pytest.param(captured, marks=pytest.mark.execution("nanoGPT", "keep")),
    pytest.param(reduce_overhead, marks=pytest.mark.execution("nanoGPT", "keep")),
]


def nothing(loss: Tensor) -> None:
    """What is done after a step without an agent."""


@pytest.mark.parametrize("loop", LOOPS)
def test_a_gpu_step_keeps_its_attention_to_the_last_bit(loop: Loop) -> None:
    plain = model()
    losses = loop(plain, nothing)
    got = watched(model(), loop, **KEEP)
    for a, b in zip(got.losses + got.weights, losses + [p.detach() for p in plain.parameters()], strict=True):
        assert torch.equal(a, b)
    assert got.rows == [STEPS * 8] * 4


@pytest.mark.parametrize("loop", [eager, captured, reduce_overhead])
def test_a_measured_step_never_waits_for_the_device(loop: Loop) -> None:
    def no_more_waiting(agent: Agent) -> None:
        if agent.current_step == 5:  # kernels and modules load, and graphs are captured, in the first steps
            torch.cuda.set_sync_debug_mode("error")

    try:
        got = watched(model(), loop, during=no_more_waiting, norms_every_steps=1, **KEEP)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.rows == [STEPS * 8] * 4


def test_torch_compile_makes_its_graphs_anew_for_a_switch_and_a_capture_by_hand_says_that_it_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def switch(agent: Agent) -> None:
        if agent.current_step == 6:
            agent.set_mode([(1, 0)], "exact_delta", "a test")

    got = watched(model(), reduce_overhead, during=switch, **KEEP)
    assert got.rows == [STEPS * 8] * 2 + [6 * 8 + 4 * ROWS * LENGTH] * 2
    caplog.clear()
    assert [each.outcome for each in got.listener.of(wire.Switched)] == ["applied"]
    got = watched(model(), captured, during=switch, **KEEP)
    assert got.rows == [STEPS * 8] * 4
    assert "Capture it again" in caplog.text
    assert got.listener.of(wire.Switched) == []


def test_a_switch_that_a_captured_step_hid_is_applied_once_the_step_is_captured_again() -> None:
    def switch(agent: Agent) -> None:
        if agent.current_step == 6:
            agent.set_mode([(1, 0)], "exact_delta", "a test")

    def twice(trained: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        return captured(trained, stepped) + captured(trained, stepped)

    got = watched(model(), twice, during=switch, **KEEP)
    [switched] = got.listener.of(wire.Switched)
    assert (switched.outcome, switched.step) == ("applied", STEPS)  # the first step that ran uncaptured shows it
    assert got.rows == [2 * STEPS * 8] * 2 + [STEPS * (8 + ROWS * LENGTH)] * 2


def test_every_row_sampled_gives_what_our_kernels_count() -> None:
    kept, served = watched(model(), eager, **{**KEEP, "probe_rows": 10**6}), watched(model(), eager)
    assert kept.rows == served.rows
    measured, counted = kept.words[0][:2], served.words[0][:2]  # the first layer's input is the same to the last bit
    for slot in (Slot.TIED_ROWS_BF16, Slot.SCORE_MAX, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
        near = slot_values(counted, slot)
        np.testing.assert_allclose(slot_values(measured, slot), near, rtol=1e-5, atol=2e-3, err_msg=slot.name)


def test_an_agent_that_keeps_is_closed_like_any_other() -> None:
    agent = attach(model(), **{**EVERY_STEP, **KEEP})
    agent.close()
    assert agent.faults == {}
