"""The list of modes: its names, its flags and what follows from them."""

import pytest
from pydantic import TypeAdapter, ValidationError

from foreshock.contract.modes import (
    DEFAULT_MITIGATION,
    MODE_NAMES,
    MODES,
    Mode,
    all_modes,
    is_mode,
    mode_name,
    modes_in,
    parse_mode,
    stronger,
)
from foreshock.contract.wire import ModeName, ReportedModeName

EVERY_FLAG = sum(mode.flag for mode in MODES)
RETIRED = (2, 16, 32)
"""Flags that stored runs have and no kernel computes."""


def test_the_flags_that_runs_have_stored_keep_their_numbers_and_names() -> None:
    stored = {"exact_delta": 1, "paper_softmax": 4, "row_corrected": 8}
    assert stored.items() <= {mode.name: int(mode.flag) for mode in MODES}.items()
    assert not EVERY_FLAG & sum(RETIRED)
    assert [mode.flag for mode in MODES] == [flag for flag in Mode if flag]


def test_a_name_and_its_flags_say_the_same_whatever_the_order_of_its_parts() -> None:
    assert sorted(all_modes()) == [flags for flags in range(EVERY_FLAG + 1) if flags & EVERY_FLAG == flags]
    for flags in all_modes():
        parts = [mode.name for mode in MODES if mode.flag & flags]
        assert parse_mode(mode_name(flags)) == flags
        assert parse_mode("+".join(reversed(parts)) or "plain") == flags
    assert parse_mode(DEFAULT_MITIGATION) in all_modes()


@pytest.mark.parametrize("flags", [*RETIRED, 8 + 16, 64, -1])
def test_flags_that_do_not_exist_have_no_name(flags: int) -> None:
    with pytest.raises(ValueError, match=rf"mode {flags} does not exist; allowed are plain, exact_delta"):
        mode_name(flags)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        *((name, "") for name in ("", "fast", "stable_softmax", "plain+exact_delta", "exact_delta+", "x" * 900)),
        ("row_corected", "row_corrected"),
        ("EXACT_DELTA", "exact_delta"),
        ("exact_delta+row_correct", "row_corrected"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_the_one_that_was_meant(name: str, near: str) -> None:
    hint = f"did you mean '{near}'\\? " if near else ".*"
    with pytest.raises(ValueError, match=rf"does not exist; {hint}allowed are plain, .*joined by \+"):
        parse_mode(name)
    assert not is_mode(name)


def test_an_escalation_ends_and_proposes_only_what_may_be_proposed() -> None:
    for name in MODE_NAMES:
        now, steps = name, 0
        while (following := stronger(now)) is not None:
            added = [mode for mode in modes_in(parse_mode(following)) if not mode.flag & parse_mode(now)]
            assert added
            assert all(mode.proposed for mode in added)
            now, steps = following, steps + 1
            assert steps <= len(MODES)
    assert stronger("paper_softmax") == "exact_delta+paper_softmax"
    assert stronger("of_tomorrow") is None


def test_orders_name_modes_that_exist_and_reports_may_name_those_of_a_newer_agent() -> None:
    order, report = TypeAdapter(ModeName), TypeAdapter(ReportedModeName)
    assert order.validate_python("paper_softmax+exact_delta") == "exact_delta+paper_softmax"
    with pytest.raises(ValidationError, match="allowed are plain, exact_delta"):
        order.validate_python("of_tomorrow")
    assert report.validate_python("of_tomorrow") == "of_tomorrow"
    for unfit in ("", "no such", "x" * 65, "a\n", "<b>"):
        with pytest.raises(ValidationError):
            report.validate_python(unfit)
