"""What a person gets to resume a failed run: from agents' events over the service to the command line."""

from typing import Any

from tests.server.orders import start

from foreshock.contract.wire import Checkpoint
from foreshock.server.testing import FakeRank

PLAN = "/v1/runs/run-1/resume-plan"


def checkpoint(step: int, *, requested: bool = False) -> Checkpoint:
    return Checkpoint(step=step, path=f"out/checkpoint-{step}", trainer="transformers", requested=requested)


async def test_the_plan_names_the_last_clean_checkpoint_and_the_log_tells_of_each(service: Any) -> None:
    rank = FakeRank()
    await start(service, rank, policy="observe")
    assert "nothing to go back to" in (await service.get(PLAN))["sentence"]
    await service.store(rank, checkpoint(10), rank.verdict(20), checkpoint(25, requested=True))
    plan = await service.get(PLAN)
    assert plan["commands"][0] == 'trainer.train(resume_from_checkpoint="out/checkpoint-10")'
    assert [(one["step"], one["label"], one["pinned"]) for one in plan["checkpoints"]] == [
        (25, "after a warning", False),
        (10, "clean", True),
    ]
    [event, _] = (await service.get("/v1/runs/run-1/events", kind="checkpoint"))["events"]
    assert event["checkpoint"]["requested"]
    assert event["sentence"] == ("Checkpoint of step 25: out/checkpoint-25. foreshock asked for it at a warning.")


async def test_checkpoints_of_steps_that_a_resumed_run_makes_again_are_left_out(service: Any) -> None:
    first = FakeRank()
    await start(service, first, policy="observe")
    await service.store(first, checkpoint(10), checkpoint(30), first.verdict(35))
    again = FakeRank(boot="b2")
    await service.store(again, again.started(step=20, policy="observe"), again.sample(25))
    assert [one["step"] for one in (await service.get(PLAN))["checkpoints"]] == [10]
