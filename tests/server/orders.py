"""Orders as people give them, the ranks that get them, and what a rank switched by itself."""

from typing import Any

from foreshock.contract.wire import Policy, Switched
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


def local(outcome: str, name: str = "local-1", step: int = 20) -> Switched:
    return Switched.model_validate(
        {
            "id": name,
            "step": step,
            "outcome": outcome,
            "heads": [[0, 2]],
            "before": ["plain"],
            "after": ["exact_delta"],
            "reason": "offset grows",
            "verdict": "warn-1",
        }
    )
