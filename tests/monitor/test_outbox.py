"""Where events go: to every subscriber and the sender in their order, whatever one of them does with them."""

import time
from typing import Any

import pytest
from tests.monitor.doubles import verdict

from foreshock.contract import wire
from foreshock.monitor.outbox import Outbox

STARTED = wire.Started(
    step=0, unix_seconds=1.0, world_size=1, layers=(), policy="observe", numerics="auto", mitigation="exact_delta"
)
FINISHED = wire.Finished(step=3, unix_seconds=1.0, status="completed")


class Contained:
    """Stands for a guard: counts what failed, and raises nothing."""

    def __init__(self) -> None:
        self.faults = 0

    def run(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception:
            self.faults += 1
            return None


class Queue:
    """Stands for the sender: takes so many things before it is full."""

    def __init__(self, room: int = 1000) -> None:
        self.room, self.got = room, list[Any]()
        self.closed_after: float | None = None

    def put(self, event: Any) -> None:
        self.got.append(event)

    def has_room(self) -> bool:
        return len(self.got) < self.room

    def close(self, seconds: float) -> None:
        self.closed_after = seconds
        time.sleep(0.01)


class Draft:
    """Stands for what the sender's thread makes an event of."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.built = 0

    def build(self) -> wire.Finished:
        self.built += 1
        return FINISHED.model_copy(update={"step": self.number})


def made(room: int = 1000, *, begun: bool = True) -> tuple[Any, Any, Any]:
    guards: Any = {name: Contained() for name in ("sinks", "sender", "mirror", "tracker")}
    box: Any = Outbox(guards)
    if begun:
        box.begin(STARTED)
    box.sender = Queue(room)
    return box, box.sender, guards


@pytest.mark.parametrize(("state", "lines"), [("raised", 1), ("updated", 0), ("cleared", 0)])
def test_a_warning_stands_in_the_log_once_when_it_is_raised(
    state: Any, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    box, _, _ = made()
    about = verdict(0, 2).model_copy(update={"state": state, "step": 70, "sentence": "It drifts."})
    with caplog.at_level("WARNING", "foreshock"):
        box.emit(about)
    assert [record.getMessage() for record in caplog.records] == ["foreshock, step 70: It drifts."] * lines


def test_of_144_heads_that_one_cause_reaches_the_first_is_a_warning_of_the_log_and_the_others_are_for_who_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    box, _, _ = made()

    def levels(*told: wire.Verdict) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", "foreshock"):
            for each in told:
                box.emit(each)
        return [record.levelname for record in caplog.records]

    heads = [verdict(number // 12, number % 12).model_copy(update={"id": f"w{number}"}) for number in range(144)]
    assert levels(*heads) == ["WARNING"] + ["INFO"] * 143
    growth = heads[0].model_copy(update={"id": "g", "cause": "score growth"})
    assert levels(growth) == ["WARNING"], "another cause is another incident"
    note = growth.model_copy(update={"id": "n", "severity": "info"})
    assert levels(note) == ["INFO"]
    cleared = [head.model_copy(update={"state": "cleared"}) for head in heads]
    assert levels(*cleared) == []
    assert levels(heads[7]) == ["WARNING"], "all was quiet again"


def test_a_warning_whose_cause_is_corrected_stands_under_the_new_one(caplog: pytest.LogCaptureFixture) -> None:
    box, _, _ = made()
    first = verdict(0, 2).model_copy(update={"id": "a", "cause": "score growth"})
    box.emit(first)
    box.emit(first.model_copy(update={"cause": "rounding", "state": "updated"}))
    with caplog.at_level("WARNING", "foreshock"):
        caplog.clear()
        box.emit(verdict(0, 3).model_copy(update={"id": "b"}))
        assert caplog.records == []
        box.emit(verdict(0, 4).model_copy(update={"id": "c", "cause": "score growth"}))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_switch_from_before_the_start_waits_for_it_and_is_told_once_with_its_step() -> None:
    box, queue, _ = made(begun=False)
    switch = wire.Switched(
        id="s", step=0, outcome="applied", heads=((0, 0),), before=("plain",), after=("exact_delta",), reason="set"
    )
    box.emit(switch)
    assert queue.got == []
    box.begin(STARTED.model_copy(update={"step": 400}))
    box.begin(STARTED.model_copy(update={"step": 500}))
    box.emit(switch)
    assert [(event.kind, event.step) for event in queue.got] == [
        ("started", 400),
        ("switched", 400),
        ("started", 500),
        ("switched", 0),
    ]


def test_a_draft_is_built_here_only_where_somebody_listens() -> None:
    box, queue, _ = made()
    first, second = Draft(1), Draft(2)
    box.emit_sample(first)
    assert (queue.got, first.built) == ([first], 0)
    heard: list[wire.Event] = []
    box.subscribe(heard.append)
    box.emit_sample(second)
    assert second.built == 1
    assert queue.got[1:] == heard == [FINISHED.model_copy(update={"step": 2})]


def test_the_sender_and_the_mirror_share_the_time_to_close() -> None:
    box, queue, _ = made()

    class Mirror:
        joined: float | None = None

        def end(self) -> None:
            assert queue.closed_after is None  # it ends while the sender sends

        def join(self, seconds: float) -> None:
            self.joined = seconds

    box._mirror = mirror = Mirror()
    box.close(2.0)
    assert queue.closed_after == 2.0
    assert mirror.joined is not None
    assert mirror.joined < 2.0
