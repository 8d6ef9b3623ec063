"""A run whose heads grow at different rates before and after a switch, and the verification of that switch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.server.orders import ORDER

from foreshock.contract.modes import parse_mode
from foreshock.contract.slots import Slot
from foreshock.contract.wire import Array, Policy, Sample
from foreshock.server.testing import FakeRank
from foreshock.server.verification import verify

WINDOW = 1000


def grown(rank: FakeRank, step: int, rate: float, base: float = 1.0, mode: int = 0) -> Sample:
    """A sample in which every head's offset and largest score are base * exp(rate * step / WINDOW)."""
    words = rank.words(step)
    floats = words.view(np.float64)
    size = base * np.exp(rate * step / WINDOW)
    floats[:, Slot.SCORE_MAX] = floats[:, Slot.ROW_MAX_ABS] = 12 * size
    floats[:, Slot.SCORE_OFFSET_SUM] = -size * words[:, Slot.ROWS]
    floats[:, Slot.SCORE_OFFSET_SUMSQ] = size**2 * words[:, Slot.ROWS]
    return rank.sample(step, since=step - 20, mode=mode).model_copy(update={"states": Array.of(words)})


async def switched(
    service: Any,
    policy: Policy = "approve",
    before: float = 1.0,
    after: float = 1.0,
    size: float = 4.0,
    warnings: Sequence[dict[str, Any]] = ({},),
    had: str = "plain",
    plain_from: int = 3020,
    **order: Any,
) -> str:
    """A run whose heads are switched at step 2000 and grow at the rate `before` until then and `after` for 1000 steps.

    size: initial offset in nats. warnings: changes to a warning of head 2 at step 1990, one entry per warning.
    had: mode before the switch. plain_from: step from which the heads are plain again.
    """
    rank = FakeRank()
    await service.store(rank, rank.started(policy=policy))
    verdicts = (rank.verdict(**{"step": 1990, **warning}) for warning in warnings)
    await service.store(rank, *(grown(rank, step, before, size) for step in range(20, 2000, 20)), *verdicts)
    command: str = (await service.client.post("/v1/runs/run-1/commands", json={**ORDER, **order})).json()["id"]
    [sent] = (await service.store(rank, grown(rank, 2000, before, size))).commands
    answer = rank.answer(sent, 2000)
    await service.store(rank, answer.model_copy(update={"before": (had,) * len(answer.heads)}))
    base = size * np.exp((before - after) * 2)
    modes = ((step, int(parse_mode(sent.mode)) * (step < plain_from)) for step in range(2020, 3020, 20))
    await service.store(rank, *(grown(rank, step, after, base, mode) for step, mode in modes))
    return command


async def judge(service: Any) -> None:
    state = service.app.state
    await verify(state.store, state.settings)
