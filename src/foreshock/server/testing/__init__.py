"""A real service, and batches as a rank sends them, for tests and benchmarks. Not part of a wheel."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from foreshock.contract.slots import Slot, Words, identity_row
from foreshock.contract.wire import (
    Ack,
    Array,
    Batch,
    Command,
    Event,
    Layer,
    Outcome,
    Policy,
    Sample,
    Started,
    Switched,
    Verdict,
    head_refs,
)
from foreshock.server.child import ServiceProcess


class LiveService(ServiceProcess):
    """A ServiceProcess with clients for it; its /metrics are never cached."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None, **constants: float) -> None:
        """constants: class variables of Settings to change, in addition to the settings of `environment`."""
        super().__init__(folder, environment)
        self.module = ("foreshock.server.testing", json.dumps({"metrics_seconds": 0.0, **constants}))

    def client(self, token: str | None = None, timeout: float = 30.0) -> httpx.Client:
        """A client of the service."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def post(self, batch: Batch, token: str | None = None) -> Ack:
        """Send a batch and return its acknowledgement."""
        with self.client(token) as client:
            return Ack.model_validate_json(post(client, batch).raise_for_status().content)


def post(client: httpx.Client, batch: Batch) -> httpx.Response:
    """Send a batch and return the response."""
    body = batch.model_dump_json()
    return client.post("/v1/batches", content=body, headers={"content-type": "application/json"})


class FakeRank:
    """Makes the batches that one boot of one rank would send; values are a function of step, rank and boot."""

    def __init__(
        self, run: str = "run-1", rank: int = 0, boot: str = "b1", layers: int = 2, heads: Sequence[int] = (0, 1, 2)
    ) -> None:
        self.run, self.rank, self.boot, self.sequence = run, rank, boot, 0
        self.layers = tuple(
            Layer(
                layer=number,
                name=f"h.{number}.attn",
                heads=tuple(heads),
                kv_heads=len(heads),
                head_dim=16,
                served_by="reference",
            )
            for number in range(layers)
        )
        self.count = layers * len(heads)

    def batch(self, *events: Event, sequence: int | None = None) -> Batch:
        """The next batch, or the one with this sequence."""
        self.sequence = self.sequence + 1 if sequence is None else sequence
        return Batch(run=self.run, rank=self.rank, boot=self.boot, sequence=self.sequence, events=events)

    def started(
        self, step: int = 0, policy: Policy = "auto", mitigation: str = "exact_delta", **others: Any
    ) -> Started:
        """The first event of the boot."""
        return Started(
            step=step,
            unix_seconds=1.0,
            layers=self.layers,
            policy=policy,
            numerics="kernel",
            mitigation=mitigation,
            labels={"model": "gpt"},
            **others,
        )

    def words(self, step: int) -> Words:
        """Head states, [heads, SLOT_COUNT]."""
        random = np.random.default_rng([step, self.rank, len(self.boot), *self.boot.encode()])
        words = np.tile(identity_row(), (self.count, 1))
        floats = words.view(np.float64)
        words[:, Slot.ROWS] = 1000
        words[:, Slot.TIED_ROWS_BF16] = random.integers(0, 1000, self.count)
        floats[:, Slot.SCORE_MAX] = random.normal(size=self.count) * 10
        floats[:, Slot.ROW_MAX_ABS] = np.abs(floats[:, Slot.SCORE_MAX])
        floats[:, Slot.SCORE_OFFSET_SUM] = random.normal(size=self.count) * 1000
        floats[:, Slot.SCORE_OFFSET_SUMSQ] = floats[:, Slot.SCORE_OFFSET_SUM] ** 2
        floats[:, Slot.DELTA_BIAS_SUM] = random.normal(size=self.count)
        floats[:, Slot.DELTA_BIAS_ABS] = 10.0
        floats[:, Slot.DELTA_BIAS_SUMSQ] = 4.0
        return words

    def sample(self, step: int, since: int | None = None, loss: float | None = 3.0, mode: int = 0) -> Sample:
        """The sample of a step."""
        return Sample(
            step=step,
            since_step=step - 1 if since is None else since,
            unix_seconds=float(step),
            states=Array.of(self.words(step)),
            modes=Array.of(np.full(self.count, mode, dtype=np.int32)),
            risk=Array.of(np.linspace(0.0, 0.9, self.count).astype(np.float32)),
            loss=loss,
            grad_norm=1.0 + self.rank,
            learning_rate=1e-3,
            step_seconds=0.5,
            agent_seconds=1e-4,
        )

    def verdict(self, step: int, layer: int = 0, head: int = 2, name: str = "warn-1", **changes: Any) -> Verdict:
        """A raised warning."""
        fields: dict[str, Any] = {
            "state": "raised",
            "severity": "warning",
            "cause": "rounding",
            "signal": "offset",
            "evidence": {"offset": 6.25},
            "forecast_steps": 2100.0,
            "sentence": f"layer {layer} head {head} drifts",
        }
        return Verdict(id=name, step=step, layer=layer, head=head, **{**fields, **changes})

    def answer(self, command: Command, step: int, outcome: Outcome = "applied") -> Switched:
        """The answer to a command."""
        heads = command.heads or tuple(head_refs(self.layers))
        return Switched(
            id=f"answer-{command.id}"[:120],
            step=step,
            command=command.id,
            outcome=outcome,
            heads=heads,
            before=("plain",) * len(heads),
            after=(command.mode if outcome == "applied" else "plain",) * len(heads),
            reason="ordered",
        )
