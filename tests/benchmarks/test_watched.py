"""Tasks in watched processes: what hangs or crashes is said, and what comes after it is carried out all the same."""

import sys
import time

from foreshock.benchmarks.watched import BROKEN, Watched

PROGRAM = f"""
import os, sys, time
for task in sys.argv[1:]:
    if task == "hang":
        time.sleep(60)
    if task == "crash":
        os.abort()
    print("a line that is no result", flush=True)
    print('{{"wrong": []}}', flush=True)
    if task == "lose":
        sys.exit({BROKEN})
"""


def carried_out(*tasks: str, patience: float = 10.0, seconds: float = 60.0) -> dict[str, list[str]]:
    command = [sys.executable, "-c", PROGRAM]
    said = Watched(command, list(tasks), patience, time.monotonic() + seconds).wait()
    return {x["task"]: x["wrong"] for x in said}


def test_every_task_says_its_result() -> None:
    assert carried_out("one", "two") == {"one": [], "two": []}


def test_one_that_hangs_is_killed_and_the_next_carried_out() -> None:
    assert carried_out("one", "hang", "two", patience=2.0) == {"one": [], "hang": ["said nothing for 2 s"], "two": []}


def test_one_that_crashes_is_named_and_the_next_carried_out() -> None:
    assert carried_out("crash", "two") == {"crash": ["ended with -6 (SIGABRT)"], "two": []}


def test_a_process_that_asks_for_another_takes_no_task_with_it() -> None:
    assert carried_out("lose", "two") == {"lose": [], "two": []}


def test_after_the_third_process_nothing_more_is_tried() -> None:
    assert list(carried_out("crash", "lose", "hang", "left", patience=2.0)) == ["crash", "lose", "hang"]


def test_nothing_is_begun_after_the_end() -> None:
    assert carried_out("one", seconds=-1.0) == {}
