"""A training in a real trainer that stops and resumes, with or without foreshock, and the comparison of both."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tests.monitor.doubles import Listener
from tests.monitor.execution_modes import EVERY_STEP, operator_without_agent
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import Agent

STOP, STEPS, ROWS, SAMPLED = 4, 8, 2, 5
LENGTH = {"cpu": 12, "cuda": 200}
WATCHED, REFERENCES = ("keep", "kernels"), ("plain", "operator")
"""Settings of `attention`, and the trainings without foreshock that they must equal: with PyTorch's attention, and
with foreshock's operator but without the agent."""
SETTINGS = EVERY_STEP | {"run": "sharded", "probe_rows": SAMPLED, "norms_every_steps": 1}


def whole(trained: nn.Module) -> list[Tensor]:
    """All weights, gathered from all ranks."""
    every = [p.full_tensor() if isinstance(p, DTensor) else p for p in trained.parameters()]
    return [p.detach().cpu() for p in every]


class ResumedTraining:
    """Records a training that stops and resumes: losses, weights and the agent's samples."""

    def __init__(self, way: str) -> None:
        self.attention_setting = way
        self.results: dict[str, Any] = {"words": [], "intervals": [], "losses": [], "reports": []}
        self._agent: Agent | None = None
        self._listener = Listener()
        self._report = ""

    @property
    def settings(self) -> dict[str, Any] | None:
        """Settings of the agent; None without an agent."""
        return {**SETTINGS, "attention": self.attention_setting} if self.attention_setting in WATCHED else None

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Replaces the attention of a training without an agent."""
        with operator_without_agent() if self.attention_setting == "operator" else nullcontext():
            yield

    def begins(self, agent: Agent | None, trained: nn.Module) -> None:
        """Called when a process starts, before its first step."""
        self._agent, self._listener = agent, Listener()
        self.results["sharded"] = any(isinstance(p, DTensor) for p in trained.parameters())
        if agent is not None:
            agent.subscribe(self._listener)

    def stepped(self) -> None:
        """Called after an optimizer step."""
        if self._agent is not None:
            self._report = self._agent.report()

    def ends(self, trained: nn.Module, steps: int) -> None:
        """Called after the training, once the agent is closed."""
        samples = self._listener.of(wire.Sample)
        self.results["words"] += [sample.words() for sample in samples]
        self.results["intervals"] += [(sample.since_step, sample.step) for sample in samples]
        self.results["reports"] += [self._report] if self._agent is not None else []
        self.results["weights"], self.results["steps"] = whole(trained), steps


def assert_bit_identical(results: list[dict[str, dict[str, Any]]], device: str) -> None:
    """Asserts for each rank: losses and weights equal the reference, all layers are watched, and each step is counted
    once, also across the restart. Different ranks count different values."""
    for rank in results:
        for watched, reference in zip(WATCHED, REFERENCES, strict=True):
            found, expected = rank[watched], rank[reference]
            assert found["steps"] == expected["steps"] == STEPS
            assert found["losses"] == expected["losses"], f"{watched} against {reference}"
            for a, b in zip(found["weights"], expected["weights"], strict=True):
                assert torch.equal(a, b), f"{watched} against {reference}: {float((a - b).abs().max())}"
            assert all("watched 2 of 2 attention layers" in report for report in found["reports"])
            steps = [0, *(step for interval in found["intervals"] for step in interval), STEPS]
            assert steps[::2] == steps[1::2]
            assert _rows_of(found) == {_expected_rows(device, watched)}
        # the kernels round differently from PyTorch's attention
        np.testing.assert_allclose(rank["kernels"]["losses"], rank["plain"]["losses"], rtol=0.05)
    for watched in WATCHED:
        counts = [np.sum(rank[watched]["words"], axis=0) for rank in results]
        assert not any(np.array_equal(a, b) for a, b in pairwise(counts))


def _rows_of(results: dict[str, Any]) -> set[int]:
    """Rows per head, over all samples."""
    return set(np.sum([slot_values(words, Slot.ROWS) for words in results["words"]], axis=0).astype(int).tolist())


def _expected_rows(device: str, watched: str) -> int:
    return STEPS * (ROWS * LENGTH[device] if watched == "kernels" else SAMPLED)
