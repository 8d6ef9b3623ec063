"""Long runs for the pictures of the page, sent as agents send them; what a head says is a function of the step."""

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import numpy as np

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.contract.slots import Slot
from foreshock.contract.wire import Array, Event, Sample
from foreshock.server.testing import FakeRank

STEPS = 600_000


@dataclass(frozen=True)
class LongRun:
    """A run of STEPS steps with a sample every `every`; one head of the first layer drifts in its last third."""

    name: str
    layers: int
    heads: int
    every: int
    warned: int = 1
    """Heads that are warned about at the end, the one that drifts first."""

    def events(self, rank: FakeRank) -> Iterator[Event]:
        """Everything that the run's one rank has to say."""
        yield rank.started(0, "observe", DEFAULT_MITIGATION)
        size = 1.0 + np.linspace(0.0, 1.0, rank.count)
        drifting = self.heads // 2
        base = rank.words(0)
        for since in range(0, STEPS, self.every):
            step = since + self.every
            noise = np.random.default_rng(step)
            now = size * noise.normal(1.0, 0.03, rank.count)
            now[drifting] *= max(1.0, np.exp((step - STEPS * 2 / 3) / (STEPS / 12)))
            words = base.copy()
            floats = words.view(np.float64)
            words[:, Slot.ROWS] = 4096
            # Below the limit that its warning foresees.
            floats[:, Slot.SCORE_MAX] = floats[:, Slot.ROW_MAX_ABS] = 7 * now
            floats[:, Slot.SCORE_OFFSET_SUM], floats[:, Slot.SCORE_OFFSET_SUMSQ] = -4096 * now, 4096 * now**2
            norms = Array.of((7 + now).astype(np.float32)) if step % (100 * self.every) == 0 else None
            yield Sample(
                step=step,
                since_step=since,
                unix_seconds=1.7e9 + step,
                states=Array.of(words),
                modes=Array.of(np.zeros(rank.count, dtype=np.int32)),
                risk=Array.of(np.clip(now / 100, 0, 1).astype(np.float32)),
                query_norm=norms,
                key_norm=norms,
                loss=float(2.5 + 2 * np.exp(-step / 40_000) + noise.normal(0, 0.02)),
                grad_norm=float(0.4 + abs(noise.normal(0, 0.05))),
                learning_rate=2e-3,
                step_seconds=0.02,
                agent_seconds=1e-4,
            )
        others = [ref for ref in np.ndindex(self.layers, self.heads) if ref != (0, drifting)]
        for place, (layer, head) in enumerate([(0, drifting), *others][: self.warned]):
            yield rank.verdict(STEPS, layer, head, name=f"warn-{place}", forecast_steps=2100.0 + 30 * place)

    def send(self, client: httpx.Client) -> None:
        """Send the run, many samples a batch."""
        rank = FakeRank(self.name, layers=self.layers, heads=range(self.heads))
        at_once = max(1, min(400, 2_000_000 // (rank.count * 120)))
        waiting: list[Event] = []
        for event in self.events(rank):
            waiting.append(event)
            if len(waiting) == at_once:
                self._post(client, rank, waiting)
                waiting = []
        if waiting:
            self._post(client, rank, waiting)

    def _post(self, client: httpx.Client, rank: FakeRank, events: list[Event]) -> None:
        body = rank.batch(*events).model_dump_json()
        client.post("/v1/batches", content=body, headers={"content-type": "application/json"}).raise_for_status()
