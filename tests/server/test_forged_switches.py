"""What an agent says that it did is an order to the others only where the run's own policy and warnings bear it out."""

from collections import Counter
from typing import Any

import pytest
from tests.server.orders import local

from foreshock.contract.wire import HeadRef, Policy, Switched
from foreshock.server import commands
from foreshock.server.runs import incidents
from foreshock.server.store import audit
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.promise("S11")


async def real_ranks(service: Any, policy: Policy) -> list[FakeRank]:
    ranks = [FakeRank(rank=number) for number in range(3)]
    for rank in ranks:
        await service.store(rank, rank.started(policy=policy), rank.sample(19))
    return ranks


async def delivered(service: Any, ranks: list[FakeRank]) -> list[str]:
    return [command.mode for rank in ranks for command in (await service.store(rank, rank.sample(30))).commands]


async def states(service: Any) -> list[str]:
    return [command["state"] for command in (await service.get("/v1/runs/run-1/commands"))["commands"]]


@pytest.mark.parametrize("policy", ["observe", "approve"])
@pytest.mark.parametrize(("rank", "boot"), [(0, "b2"), (9, "b1")])
async def test_a_boot_that_says_auto_orders_nothing_where_the_others_do_not(
    service: Any, policy: Policy, rank: int, boot: str
) -> None:
    ranks = await real_ranks(service, policy)
    forged = FakeRank(rank=rank, boot=boot)
    await service.store(forged, forged.started(policy="auto"), forged.verdict(20), local())
    assert await delivered(service, ranks) == []
    assert await states(service) == ["proposed"]


@pytest.mark.parametrize(
    ("verdict", "switched"),
    [
        (None, local()),
        ({}, local(verdict=None)),
        ({}, local(verdict="another")),
        ({"state": "cleared"}, local()),
        ({"cause": "score growth"}, local()),
        ({"severity": "info"}, local()),
        ({}, local(after="plain")),
        ({}, local(after="paper_softmax")),
        ({}, local(heads=((7, 7),))),
    ],
)
async def test_what_no_standing_warning_calls_for_is_at_most_proposed(
    service: Any, verdict: dict[str, Any] | None, switched: Switched
) -> None:
    ranks = await real_ranks(service, "auto")
    said = [] if verdict is None else [ranks[0].verdict(20, **verdict)]
    await service.store(ranks[0], *said, switched)
    assert await delivered(service, ranks) == []
    assert set(await states(service)) <= {"proposed", "applied"}


async def test_what_a_standing_warning_calls_for_reaches_the_others_under_auto(service: Any) -> None:
    ranks = await real_ranks(service, "auto")
    await service.store(ranks[1], ranks[1].verdict(20), local())
    assert await delivered(service, ranks) == ["exact_delta", "exact_delta"]


async def test_proposals_that_nobody_decides_are_few(service: Any) -> None:
    ranks = [FakeRank(rank=number, layers=4, heads=range(32)) for number in range(2)]
    for rank in ranks:
        await service.store(rank, rank.started(policy="observe"), rank.sample(19))
    refs = [(layer, head) for layer in range(4) for head in range(32)]
    for number, ref in enumerate(refs[:70]):
        await service.store(ranks[0], local("proposed", f"s-{number}", heads=(ref,)))
    answer = await service.get("/v1/runs/run-1/commands", limit=500)
    assert len(answer["commands"]) == 64


async def test_hundreds_of_switches_in_one_batch_are_one_order_and_read_the_run_once(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[HeadRef] = [(layer, head) for layer in range(2) for head in range(3)]
    names = [f"w-{layer}-{head}" for layer, head in heads]
    ranks = await real_ranks(service, "auto")
    one = ranks[0]
    await service.store(one, *(one.verdict(19, *ref, name=name) for ref, name in zip(heads, names, strict=True)))
    read: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        real = getattr(module, name)

        def count(*given: Any, **named: Any) -> Any:
            read[name] += 1
            return real(*given, **named)

        monkeypatch.setattr(module, name, count)

    counted(incidents, "read_back")
    counted(commands, "described")
    counted(commands, "heads_by_rank")
    counted(audit, "append")
    many = [
        local(name=f"local-{number}", heads=(heads[number % 6],), verdict=names[number % 6]) for number in range(300)
    ]
    await service.store(one, *many)
    assert read["read_back"] <= 3 * len(heads)  # of the warnings that are named, not of each switch
    assert read["described"] == len(ranks)
    assert read["heads_by_rank"] <= 2
    assert read["append"] < 10
    [command] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    assert (command["source"], sorted(map(tuple, command["heads"]))) == ("rank", heads)
    assert command["reason"] == "offset grows (300 switches)"
    assert await delivered(service, ranks[1:]) == ["exact_delta"] * 2


async def test_of_many_switches_in_one_batch_none_is_an_order_where_one_names_no_warning(service: Any) -> None:
    ranks = await real_ranks(service, "auto")
    one = ranks[0]
    await service.store(one, one.verdict(19))
    forged = [local(name=f"local-{number}") for number in range(20)]
    await service.store(one, *forged, local(name="local-20", verdict="warn-2"))
    assert await delivered(service, ranks) == []
    assert await states(service) == ["proposed"]


async def test_a_warning_of_another_rank_bears_out_no_switch(service: Any) -> None:
    ranks = await real_ranks(service, "auto")
    await service.store(ranks[1], ranks[1].verdict(20))
    await service.store(ranks[0], local())
    assert await delivered(service, ranks) == []
    assert await states(service) == ["proposed"]


async def test_what_a_former_process_did_is_noted_and_is_no_order(service: Any) -> None:
    ranks = await real_ranks(service, "auto")
    newer = FakeRank(rank=0, boot="b2")
    await service.store(newer, newer.started(policy="auto"), newer.sample(21))
    await service.store(ranks[0], ranks[0].verdict(20), local())
    assert await delivered(service, [newer, *ranks[1:]]) == []
    assert await states(service) == []


async def test_a_switch_that_was_rejected_is_not_proposed_again_for_other_heads_of_the_same_warning(
    service: Any,
) -> None:
    ranks = await real_ranks(service, "approve")
    both: tuple[HeadRef, ...] = ((0, 1), (0, 2))
    await service.store(ranks[0], ranks[0].verdict(20), local("proposed", heads=both))
    [proposal] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    await service.client.post(f"/v1/commands/{proposal['id']}/reject", json={"who": "ann", "reason": "noise"})
    await service.store(ranks[0], local("proposed", "local-2", heads=both))
    assert await states(service) == ["rejected"]
