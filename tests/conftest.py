"""The tiers of the tests, their sizes, and what runs with the machine to itself."""

import gc
import logging
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

ROOT: Final = Path(__file__).parents[1]
ALONE: Final = (
    "tests/e2e/test_from_training_to_switch.py",
    "tests/faults/test_host_cost.py",
    "tests/faults/test_kills.py",
    "tests/faults/test_processes.py",
    "tests/faults/test_ranks.py",
    "tests/server/test_soak.py",
)
"""Tests that measure time, or stop and starve processes: they run one after another, with the machine to themselves,
after the others, which share it."""


# A busy machine is no fault of a test: what takes long is stopped by pytest-timeout alone.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --tier and --size."""
    parser.addoption(
        "--tier",
        choices=("quick", "full", "long"),
        default="quick",
        help="full: also the tests marked `full`; long: all of them, at the sizes that the promises name",
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


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A service that is started in this process sends all logs to what standard error was then: a file that pytest
    closes, so that the next test's output would be full of logging errors."""
    loggers = [logging.getLogger(name) for name in (None, "alembic", "uvicorn")]
    root, levels = loggers[0], [logger.level for logger in loggers]
    handlers = list(root.handlers)
    structured = _structured()
    yield
    root.handlers = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    if (structlog := sys.modules.get("structlog")) is not None and _structured() != structured:
        structlog.reset_defaults()
        if structured is not None:
            structlog.configure(**structured)


@pytest.fixture(autouse=True)
def attention_as_before() -> Iterator[None]:
    """A test that leaves its agent attached fails itself, not whoever comes after it."""
    before = _rebound()
    yield
    assert _rebound() in (False, before), "this test left an agent attached: PyTorch's attention is still rebound"


def _rebound() -> bool:
    interception = sys.modules.get("foreshock.monitor.attention.interception")
    functional = sys.modules.get("torch.nn.functional")
    if interception is None or functional is None:
        return False
    ours: Any = interception.scaled_dot_product_attention
    return functional.scaled_dot_product_attention is ours


def _structured() -> dict[str, Any] | None:
    """How structlog was set up, if anybody did; where only kernels are tested it is not even installed."""
    structlog = sys.modules.get("structlog")
    return structlog.get_config() if structlog is not None and structlog.is_configured() else None


@pytest.fixture(scope="session")
def sizes(pytestconfig: pytest.Config) -> Sizes:
    """The sizes of this session."""
    return Sizes(pytestconfig)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of a run that wants the tests that run alone, or those that do not, the files of the others are not imported;
    nor are files without a test marked `full` where these are wanted."""
    _, full, kind = config.option.markexpr.rpartition("full and ")
    if collection_path.suffix != ".py" or kind not in ("alone", "not alone"):
        return None
    other = _alone(collection_path) == (kind == "not alone") or (
        full and "mark.full" not in collection_path.read_text()
    )
    return True if other else None


def _alone(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix().startswith(ALONE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what runs alone, leaves out what the tier does not ask for, and gives the tiers their time."""
    for item in items:
        if _alone(item.path):
            item.add_marker("alone")
    tier = config.getoption("--tier")
    if tier == "quick":
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
    else:  # a test of the long tier may take hours; it says itself when it hangs
        for item in items:
            item.add_marker(pytest.mark.timeout(6 * 3600 if tier == "long" else 900), append=False)


def pytest_collection_finish() -> None:
    """What all tests import is half a million objects, which every later collection of garbage would go through."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was not run and how to run it; how to run again what failed."""
    tier = config.getoption("--tier")
    if tier == "quick":
        terminalreporter.write_line("tests marked `full` were left out (--tier quick); `make test-full` runs them")
    reports = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    failed = list(dict.fromkeys(report.nodeid for report in reports))
    if failed:
        more = f" (and {len(failed) - 5} more)" if len(failed) > 5 else ""
        terminalreporter.write_line(f"to run what failed by itself{more}, with the log of each step and no other load:")
        given = " ".join(shlex.quote(name) for name in failed[:5])
        terminalreporter.write_line(f"  .venv/bin/python -P -m pytest -vv --tier {tier} {given}")
