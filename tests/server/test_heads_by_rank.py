"""An order for every head is planned from the modes that its ranks tell."""

from typing import Any

from tests.server.orders import order, start

from foreshock.server.testing import FakeRank


async def test_an_order_for_every_head_adds_to_modes_that_were_set_by_hand_and_says_so_before(service: Any) -> None:
    async def planned(mode: str) -> list[list[Any]]:
        answer = await service.get("/v1/runs/run-1/switches", mode=mode)
        return [*([change["mode"], change["heads"]] for change in answer["changes"]), answer["unchanged"]]

    rank = FakeRank()
    await start(service, rank)
    assert await planned("row_corrected") == [["row_corrected", None], []]
    own = {(0, 2): "paper_softmax", (1, 0): "paper_softmax+row_corrected"}
    for ref, mode in own.items():
        await order(service, heads=[list(ref)], mode=mode)
    for command in (await service.store(rank, rank.sample(10))).commands:
        await service.store(rank, rank.answer(command, 10))
    others = [[0, 0], [0, 1], [1, 1], [1, 2]]
    expected = [["row_corrected", others], ["paper_softmax+row_corrected", [[0, 2]]], [[1, 0]]]
    assert await planned("row_corrected") == expected
    assert await planned("plain") == [["plain", None], []]
    answer = await service.client.get("/v1/runs/run-1/switches?mode=nothing")
    assert answer.status_code == 422
    assert (await service.client.get("/v1/runs/run-9/switches?mode=plain")).status_code == 404
