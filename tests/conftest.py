"""Test tiers and sizes, and the tests that run one at a time."""

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
SERIAL: Final = (
    "tests/e2e/test_from_training_to_switch.py",
    "tests/faults/test_host_cost.py",
    "tests/faults/test_kills.py",
    "tests/faults/test_processes.py",
    "tests/faults/test_ranks.py",
    "tests/server/test_soak.py",
)
"""Tests that measure time, or stop and starve processes: they run one at a time, after the parallel tests."""


# A slow machine must not fail a test: only pytest-timeout stops slow tests.
settings.register_profile("foreshock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("foreshock")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --tier and --size."""
    parser.addoption(
        "--tier",
        choices=("quick", "full", "long"),
        default="quick",
        help="full: also tests marked `full`; long: all tests, at the sizes stated in the promises",
    )
    parser.addoption("--size", metavar="NAME=N", action="append", default=[], help="set the size NAME to N")


class Sizes:
    """The size of a test: `sizes("forks", quick=5, long=500)`, with `long` for --tier long, or N for --size forks=N."""

    def __init__(self, config: pytest.Config) -> None:
        self.long = config.getoption("--tier") == "long"
        self._given = dict(given.split("=", 1) for given in config.getoption("--size"))

    def __call__(self, name: str, *, quick: int, long: int) -> int:
        return int(self._given.get(name, long if self.long else quick))

    def fuzzed(self, cases: int) -> settings:
        """Hypothesis settings for `cases` examples: the same examples in each run, except in the long tier."""
        return settings(
            max_examples=cases,
            deadline=None,
            database=None,
            derandomize=not self.long,
            suppress_health_check=list(HealthCheck),
        )

    def until(self) -> float:
        """Deadline of a test that repeats its work: --size seconds=N from now, on the monotonic clock."""
        return time.monotonic() + self("seconds", quick=600, long=6 * 3600)


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """A service in this process logs to the standard error that it had at its start. pytest closes that file after the
    test, so without this fixture later tests would print logging errors."""
    loggers = [logging.getLogger(name) for name in (None, "alembic", "uvicorn")]
    root, levels = loggers[0], [logger.level for logger in loggers]
    handlers = list(root.handlers)
    config_before = _structlog_config()
    yield
    root.handlers = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    if (structlog := sys.modules.get("structlog")) is not None and _structlog_config() != config_before:
        structlog.reset_defaults()
        if config_before is not None:
            structlog.configure(**config_before)


@pytest.fixture(autouse=True)
def check_attention_is_restored() -> Iterator[None]:
    """A test that leaves its agent attached fails, instead of a later test."""
    before = _attention_rebound()
    yield
    assert _attention_rebound() in (False, before), (
        "the test left an agent attached: PyTorch's attention is still replaced"
    )


def _attention_rebound() -> bool:
    interception = sys.modules.get("foreshock.monitor.attention.interception")
    functional = sys.modules.get("torch.nn.functional")
    if interception is None or functional is None:
        return False
    replacement: Any = interception.scaled_dot_product_attention
    return functional.scaled_dot_product_attention is replacement


def _structlog_config() -> dict[str, Any] | None:
    """The configuration of structlog, if any. Machines that test only kernels may not have structlog."""
    structlog = sys.modules.get("structlog")
    return structlog.get_config() if structlog is not None and structlog.is_configured() else None


@pytest.fixture(scope="session")
def sizes(pytestconfig: pytest.Config) -> Sizes:
    """The test sizes of this session."""
    return Sizes(pytestconfig)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import files that the marker expression excludes: serial or parallel files, or files without a test
    marked `full`."""
    _, full, kind = config.option.markexpr.rpartition("full and ")
    if collection_path.suffix != ".py" or kind not in ("serial", "not serial"):
        return None
    not_selected = _is_serial(collection_path) == (kind == "not serial") or (
        full and "mark.full" not in collection_path.read_text()
    )
    return True if not_selected else None


def _is_serial(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix().startswith(SERIAL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks serial tests, excludes tests that the tier does not run, and sets the tier's timeout."""
    for item in items:
        if _is_serial(item.path):
            item.add_marker("serial")
    tier = config.getoption("--tier")
    if tier == "quick":
        excluded = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        if excluded:
            config.hook.pytest_deselected(items=excluded)
    else:  # a long-tier test may take hours and detects hangs itself
        for item in items:
            item.add_marker(pytest.mark.timeout(6 * 3600 if tier == "long" else 900), append=False)


def pytest_collection_finish() -> None:
    """Imports create half a million objects; freezing them makes later garbage collections fast."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints how to run the excluded tests, and how to repeat the failed tests."""
    tier = config.getoption("--tier")
    if tier == "quick":
        terminalreporter.write_line("tests marked `full` were excluded (--tier quick); `make test-full` runs them")
    reports = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    failed = list(dict.fromkeys(report.nodeid for report in reports))
    if failed:
        more = f" (and {len(failed) - 5} more)" if len(failed) > 5 else ""
        terminalreporter.write_line(f"to repeat only the failed tests{more}, with verbose output and no other load:")
        given = " ".join(shlex.quote(name) for name in failed[:5])
        terminalreporter.write_line(f"  .venv/bin/python -P -m pytest -vv --tier {tier} {given}")
