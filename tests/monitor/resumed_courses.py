"""One training in a real trainer, which stops and resumes, with foreshock or without; and what must be the same."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP, operator_alone
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import Agent

STOP, STEPS, ROWS, SAMPLED = 4, 8, 2, 5
LENGTH = {"cpu": 12, "cuda": 200}
OURS, REFERENCES = ("keep", "kernels"), ("plain", "operator")
"""Settings of `attention`, and trainings without foreshock that they must be equal to: with PyTorch's attention, and
with the operator alone."""
SETTINGS = EVERY_STEP | {"run": "sharded", "probe_rows": SAMPLED, "norms_every_steps": 1}


def whole(trained: nn.Module) -> list[Tensor]:
    """Every weight of all ranks together."""
    every = [p.full_tensor() if isinstance(p, DTensor) else p for p in trained.parameters()]
    return [p.detach().cpu() for p in every]


class Course:
    """One training, which stops and resumes: what it must know after each step, and what came of it."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.told: dict[str, Any] = {"words": [], "intervals": [], "losses": [], "reports": []}
        self._agent: Agent | None = None
        self._listener = Listener()
        self._report = ""

    @property
    def settings(self) -> dict[str, Any] | None:
        """Of the agent; None without one."""
        return {**SETTINGS, "attention": self.way} if self.way in OURS else None

    @contextmanager
    def attention(self) -> Iterator[None]:
        """The attention of a training without an agent."""
        with operator_alone() if self.way == "operator" else nullcontext():
            yield

    def begins(self, agent: Agent | None, trained: nn.Module) -> None:
        """A process start, before its first step."""
        self._agent, self._listener = agent, Listener()
        self.told["sharded"] = any(isinstance(p, DTensor) for p in trained.parameters())
        if agent is not None:
            agent.subscribe(self._listener)

    def stepped(self) -> None:
        """An optimizer step is done."""
        if self._agent is not None:
            self._report = self._agent.report()

    def ends(self, trained: nn.Module, steps: int) -> None:
        """The process ends its training, and the agent is closed."""
        samples = self._listener.of(wire.Sample)
        self.told["words"] += [sample.words() for sample in samples]
        self.told["intervals"] += [(sample.since_step, sample.step) for sample in samples]
        self.told["reports"] += [self._report] if self._agent is not None else []
        self.told["weights"], self.told["steps"] = whole(trained), steps


def assert_foreshock_changed_no_bit(told: list[dict[str, dict[str, Any]]], device: str) -> None:
    """Of the courses that each rank took: losses and weights are those of the reference, every layer was watched, and
    each step, also across the restart, is counted once; no two ranks counted the same."""
    for rank in told:
        for ours, reference in zip(OURS, REFERENCES, strict=True):
            got, expected = rank[ours], rank[reference]
            assert got["steps"] == expected["steps"] == STEPS
            assert got["losses"] == expected["losses"], f"{ours} against {reference}"
            for a, b in zip(got["weights"], expected["weights"], strict=True):
                assert torch.equal(a, b), f"{ours} against {reference}: {float((a - b).abs().max())}"
            assert all("watched 2 of 2 attention layers" in report for report in got["reports"])
            steps = [0, *(step for interval in got["intervals"] for step in interval), STEPS]
            assert steps[::2] == steps[1::2]
            assert _rows_of(got) == {_expected_rows(device, ours)}
        # the kernels compute something else than PyTorch's attention, but nearly the same
        np.testing.assert_allclose(rank["kernels"]["losses"], rank["plain"]["losses"], rtol=0.05)
    for ours in OURS:
        counts = [np.sum(rank[ours]["words"], axis=0) for rank in told]
        assert not any(np.array_equal(a, b) for a, b in pairwise(counts))


def _rows_of(told: dict[str, Any]) -> set[int]:
    """Rows counted per head over all samples."""
    return set(np.sum([slot_values(words, Slot.ROWS) for words in told["words"]], axis=0).astype(int).tolist())


def _expected_rows(device: str, ours: str) -> int:
    return STEPS * (ROWS * LENGTH[device] if ours == "kernels" else SAMPLED)
