"""`pytest --record FILE`: what became of every test that bears a `promise` or an `execution` mark, as JSON.

Documents are generated from such records (docs/reliability.md, docs/models.md). One test in it:
{"test": "tests/monitor/test_a.py::test_b[c]", "outcome": "passed" | "failed" | "skipped", "reason": why it was skipped,
"seconds": 0.12, "promise": ["A14"], "execution": [["GPT-2", "eager"]], "figures": {name: value}}; figures are what the
test gave to pytest's `record_property`.
"""

import datetime
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

MARKS: Final = ("promise", "execution")


class Recorder:
    """Keeps the outcome of marked tests, and writes them when the session ends."""

    def __init__(self, path: Path, command: str) -> None:
        self._path = path
        self._command = command
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        marks = {name: [list(mark.args) for mark in item.iter_markers(name)] for name in MARKS}
        if not any(marks.values()):
            return
        promises = [promise for args in marks["promise"] for promise in args]
        self._tests[item.nodeid] = {
            "test": item.nodeid,
            "outcome": None,
            "reason": "",
            "seconds": 0.0,
            "promise": sorted(promises),
            "execution": sorted(marks["execution"]),
            "figures": {},
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.get(report.nodeid)
        if test is None:
            return
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        test["figures"] |= dict(report.user_properties)
        if report.failed or test["outcome"] is None or report.skipped:
            test["outcome"] = report.outcome  # of setup, call and teardown the worst
        if report.skipped and isinstance(report.longrepr, tuple):
            test["reason"] = str(report.longrepr[2]).removeprefix("Skipped: ")

    def pytest_sessionfinish(self) -> None:
        ran = [test for test in self._tests.values() if test["outcome"] is not None]
        record = {
            "command": self._command,
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "machine": _machine(),
            "tests": sorted(ran, key=lambda test: str(test["test"])),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _machine() -> dict[str, str]:
    machine = {"python": platform.python_version(), "cpu": platform.machine()}
    torch = sys.modules.get("torch")  # the service's tests run without it
    if torch is not None:
        machine["torch"] = torch.__version__
        if torch.cuda.is_available():
            machine["gpu"] = torch.cuda.get_device_name()
    return machine


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --record, --tier and --size."""
    parser.addoption("--record", metavar="FILE", type=Path, help="write the outcome of marked tests to FILE, as JSON")
    parser.addoption(
        "--tier", choices=("quick", "long"), default="quick", help="long: the sizes that the promises name"
    )
    parser.addoption("--size", metavar="NAME=N", action="append", default=[], help="one size of another number")


class Sizes:
    """How large a test is made: `sizes("service_kills", quick=3, long=500)`, or what --size NAME=N says."""

    def __init__(self, config: pytest.Config) -> None:
        self.long = config.getoption("--tier") == "long"
        self._given = dict(given.split("=", 1) for given in config.getoption("--size"))

    def __call__(self, name: str, *, quick: int, long: int) -> int:
        return int(self._given.get(name, long if self.long else quick))

    def fuzzed(self, cases: int) -> settings:
        """Hypothesis on so many cases: always the same ones, but for the long tier."""
        return settings(
            max_examples=cases,
            deadline=None,
            database=None,
            derandomize=not self.long,
            suppress_health_check=list(HealthCheck),
        )

    def until(self) -> float:
        """When a test that repeats itself stops all the same: --size seconds=N from now, on the monotonic clock."""
        return time.monotonic() + self("seconds", quick=600, long=6 * 3600)


@pytest.fixture(scope="session")
def sizes(pytestconfig: pytest.Config) -> Sizes:
    """The sizes of this session."""
    return Sizes(pytestconfig)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test of the long tier may take hours; it says itself when it hangs."""
    if config.getoption("--tier") == "long":
        for item in items:
            item.add_marker(pytest.mark.timeout(6 * 3600), append=False)


def pytest_configure(config: pytest.Config) -> None:
    """Starts the recorder when it is asked for."""
    path = config.getoption("--record")
    if path is not None:
        given = (str(argument) for argument in config.invocation_params.args)
        arguments = shlex.join(path.name if argument == str(path) else argument for argument in given)
        config.pluginmanager.register(Recorder(path, f"pytest {arguments}"), "foreshock-recorder")
