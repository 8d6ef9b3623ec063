"""Arms in worker processes: what fails in one is reported, with its reason."""

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreshock.contract import wire
from foreshock.lab.training.arm import UNTREATED
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.workers import ArmOrder, Branched, Progressed, Told, Workers, in_seconds

TINY = replace(
    find_recipe("key-bias-small"),
    model=ModelConfig(layers=2, heads=2, width=16, context=16),
    steps=200,
    warmup_steps=10,
)


@pytest.mark.full
def test_a_worker_that_fails_is_reported_with_its_reason(tmp_path: Path) -> None:
    workers = Workers()
    order = ArmOrder(
        recipe=TINY,
        arm=UNTREATED,
        seed=1,
        run="r",
        steps=1,
        url=None,
        branch_from=tmp_path / "missing.pt",
        deadline=in_seconds(60),
        agent_settings={},
    )
    try:
        workers.start(order)
        with pytest.raises(RuntimeError, match=r"the variant baseline failed[\s\S]*missing.pt"):
            list(workers.messages())
    finally:
        workers.stop()


class Ended:
    """Stands for a worker's process."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode
        self.joined = self.terminated = False

    def join(self) -> None:
        self.joined = True

    def terminate(self) -> None:
        self.terminated = True


def of_processes(**processes: Ended) -> Any:
    workers: Any = Workers()
    workers._queue.close()
    workers._queue = queue.Queue()
    workers._queue.close = lambda: None
    workers._running = dict(processes)
    return workers


def test_messages_come_in_their_order_until_every_worker_is_done() -> None:
    one, other = Ended(None), Ended(None)
    workers = of_processes(untreated=one, control=other)
    said = [
        ("step", "untreated", 25),
        ("done", "control", None),
        ("branch", "untreated", 40),
        ("event", "untreated", wire.Finished(step=50, unix_seconds=1.0, status="completed").model_dump_json()),
        ("done", "untreated", None),
        ("step", "untreated", 75),
    ]
    for each in said:
        workers._queue.put(each)
    got = list(workers.messages())
    assert got[:2] == [Progressed("untreated", 25), Branched("untreated", 40)]
    assert [type(each) for each in got] == [Progressed, Branched, Told]
    assert (one.joined, other.joined) == (True, True)
    assert workers._queue.qsize() == 1  # nobody is left to be listened to


def test_a_worker_that_is_killed_is_named_by_what_people_call_its_variant() -> None:
    workers = of_processes(untreated=Ended(-9), control=Ended(None))
    with pytest.raises(RuntimeError, match="the worker of the variant baseline died with exit status -9"):
        list(workers.messages())
    running = list(workers._running.values())
    workers.stop()
    assert all(process.terminated and process.joined for process in running)
    assert list(workers.messages()) == []
