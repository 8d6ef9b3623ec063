"""Orders of people, ranks that receive them, and switches that a rank made without an order."""

from typing import Any

from foreshock.contract.wire import HeadRef, Outcome, Policy, Switched
from foreshock.server.testing import FakeRank

ORDER = {"who": "ann", "reason": "it drifts", "heads": [[0, 2]], "mode": "exact_delta"}


async def order(service: Any, key: str | None = None, **changes: Any) -> Any:
    headers = {"idempotency-key": key} if key else {}
    return await service.client.post("/v1/runs/run-1/commands", json={**ORDER, **changes}, headers=headers)


async def start(service: Any, *ranks: FakeRank, policy: Policy = "auto") -> None:
    for rank in ranks:
        await service.store(rank, rank.started(policy=policy))


async def state_of(service: Any, command: str) -> str:
    state: str = (await service.get(f"/v1/commands/{command}"))["state"]
    return state


def local(
    outcome: Outcome = "applied",
    name: str = "local-1",
    step: int = 20,
    *,
    heads: tuple[HeadRef, ...] = ((0, 2),),
    after: str = "exact_delta",
    verdict: str | None = "warn-1",
) -> Switched:
    return Switched(
        id=name,
        step=step,
        outcome=outcome,
        heads=heads,
        before=("plain",) * len(heads),
        after=(after,) * len(heads),
        reason="offset grows",
        verdict=verdict,
    )


async def commands_of(service: Any) -> list[dict[str, Any]]:
    """The orders and proposals of the run, newest first."""
    found: list[dict[str, Any]] = (await service.get("/v1/runs/run-1/commands", limit=500))["commands"]
    return found
