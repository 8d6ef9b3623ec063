"""A switch that one rank reports: ordered to the other ranks if policy and warnings justify it, otherwise proposed."""

from typing import Any

import pytest
from sqlalchemy.event import listen
from tests.server.orders import commands_of, local, start

from foreshock.contract.wire import HeadRef, Policy, Switched
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.promise("S11")
BY_ANN = {"who": "ann", "reason": "agreed"}


async def three_ranks(service: Any, policy: Policy) -> list[FakeRank]:
    ranks = [FakeRank(rank=number) for number in range(3)]
    for rank in ranks:
        await service.store(rank, rank.started(policy=policy), rank.sample(19))
    return ranks


async def delivered(service: Any, *ranks: FakeRank) -> list[str]:
    return [command.mode for rank in ranks for command in (await service.store(rank, rank.sample(30))).commands]


async def states(service: Any) -> list[str]:
    return [command["state"] for command in await commands_of(service)]


async def test_switch_justified_by_warning_under_auto_becomes_one_order_to_other_ranks(
    service: Any,
) -> None:
    first, second, third, other = (
        FakeRank(rank=number, heads=(0, 1, 2) if number < 3 else (3, 4)) for number in range(4)
    )
    await start(service, first, second, third, other)
    batch = first.batch(first.verdict(20), local("applied"))
    for _ in range(2):
        assert (await service.post(batch)).json()["commands"] == []
    for rank in (second, third):
        [command] = (await service.store(rank, rank.sample(21))).commands
        assert (command.heads, command.mode) == (((0, 2),), "exact_delta")
        await service.store(rank, rank.answer(command, 22))
    assert await delivered(service, first, other) == []
    [shown] = await commands_of(service)
    assert (shown["state"], shown["source"], shown["issued_by"]) == ("applied", "rank", "rank 0")


@pytest.mark.parametrize("policy", ["observe", "approve"])
@pytest.mark.parametrize(("rank", "boot"), [(0, "b2"), (9, "b1")])
async def test_process_claiming_auto_orders_nothing_if_others_have_another_policy(
    service: Any, policy: Policy, rank: int, boot: str
) -> None:
    ranks = await three_ranks(service, policy)
    forged = FakeRank(rank=rank, boot=boot)
    await service.store(forged, forged.started(policy="auto"), forged.verdict(20), local())
    assert await delivered(service, *ranks) == []
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
@pytest.mark.parametrize("other", [False, True])
async def test_switch_without_matching_active_warning_is_at_most_proposed(
    service: Any, verdict: dict[str, Any] | None, switched: Switched, other: bool
) -> None:
    ranks = await three_ranks(service, "auto")
    verdicts = [] if verdict is None else [ranks[int(other)].verdict(20, **verdict)]
    await service.store(ranks[int(other)], *verdicts, ranks[int(other)].sample(20))
    await service.store(ranks[0], switched)
    assert await delivered(service, *ranks) == []
    assert set(await states(service)) <= {"proposed", "applied"}


async def test_rank_orders_nothing_on_foreign_warning_or_for_foreign_heads(
    service: Any,
) -> None:
    first, second, other = (FakeRank(rank=number, heads=(0, 1, 2) if number < 2 else (3, 4)) for number in range(3))
    await start(service, first, second, other)
    await service.store(second, second.verdict(20))
    await service.store(first, local())
    assert await delivered(service, first, second) == []
    foreign = local(name="local-2", heads=((0, 3),), verdict="w-3")
    await service.store(first, first.verdict(21, head=3, name="w-3"), foreign)
    assert await delivered(service, other) == []
    assert await states(service) == ["proposed"]


async def test_hundreds_of_switches_in_one_batch_become_one_order_with_few_queries(service: Any) -> None:
    heads: list[HeadRef] = [(layer, head) for layer in range(2) for head in range(3)]
    names = [f"w-{layer}-{head}" for layer, head in heads]
    ranks = await three_ranks(service, "auto")
    one = ranks[0]
    await service.store(one, *(one.verdict(19, *ref, name=name) for ref, name in zip(heads, names, strict=True)))
    statements: list[str] = []
    listen(
        service.app.state.store.writer.engine,
        "before_cursor_execute",
        lambda *arguments: statements.append(arguments[2]),
    )
    many = [local(name=f"s-{n}", heads=(heads[n % 6],), verdict=names[n % 6]) for n in range(300)]
    await service.store(one, *many)
    assert 0 < len(statements) < 50, "there must not be a query for each switch"
    [command] = await commands_of(service)
    assert (command["source"], sorted(map(tuple, command["heads"]))) == ("rank", heads)
    assert command["reason"] == "offset grows (300 switches)"
    forged = [local(name=f"f-{number}") for number in range(2)]
    await service.store(one, *forged, local(name="f-2", verdict="nobody-said-so"))
    assert await delivered(service, *ranks[1:]) == ["exact_delta"] * 2, (
        "one switch without a warning makes none of them an order"
    )


async def test_number_of_undecided_proposals_is_limited(service: Any) -> None:
    ranks = [FakeRank(rank=number, layers=4, heads=range(32)) for number in range(2)]
    await start(service, *ranks, policy="observe")
    for number in range(70):
        await service.store(ranks[0], local("proposed", f"s-{number}", heads=((number // 32, number % 32),)))
    assert len(await commands_of(service)) == 64


async def test_switch_of_former_process_creates_no_order(service: Any) -> None:
    ranks = await three_ranks(service, "auto")
    newer = FakeRank(rank=0, boot="b2")
    await service.store(newer, newer.started(policy="auto"), newer.sample(21))
    await service.store(ranks[0], ranks[0].verdict(20), local())
    assert await delivered(service, newer, *ranks[1:]) == []
    assert await states(service) == []


async def test_rejected_switch_of_two_heads_is_not_proposed_again(
    service: Any,
) -> None:
    ranks = await three_ranks(service, "approve")
    both: tuple[HeadRef, ...] = ((0, 1), (0, 2))
    await service.store(ranks[0], ranks[0].verdict(20), local("proposed", heads=both))
    [proposal] = await commands_of(service)
    await service.client.post(f"/v1/commands/{proposal['id']}/reject", json=BY_ANN)
    await service.store(ranks[0], local("proposed", "local-2", heads=both))
    assert await states(service) == ["rejected"]


async def test_unknown_mode_of_newer_agent_is_recorded_but_never_ordered(service: Any) -> None:
    first, second = FakeRank(rank=0), FakeRank(rank=1)
    await start(service, first, second)
    await service.store(first, local("applied").model_copy(update={"after": ("of_tomorrow",)}))
    assert (await delivered(service, second), await commands_of(service)) == ([], [])
    [event] = (await service.get("/v1/runs/run-1/events", kind="switched"))["events"]
    assert event["switched"]["after"] == ["of_tomorrow"]
    await service.store(first, local("applied", "local-2", 25).model_copy(update={"before": ("of_tomorrow",)}))
    [proposal] = await commands_of(service)
    assert proposal["state"] == "proposed"  # it is unknown whether the warning justified this switch
    await service.client.post(f"/v1/commands/{proposal['id']}/approve", json=BY_ANN)
    [sent] = (await service.store(second, second.sample(26))).commands
    await service.store(second, second.answer(sent, 27))
    undone = await service.client.post(f"/v1/commands/{proposal['id']}/undo", json=BY_ANN)
    assert (undone.status_code, "this service does not know" in undone.json()["detail"]) == (409, True)
