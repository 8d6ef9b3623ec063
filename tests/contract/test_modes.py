"""The list of modes: names, flags, parsing and escalation."""

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
"""Flags that occur in stored runs but that kernels no longer support."""


def test_stored_mode_flags_keep_their_numbers_and_names() -> None:
    stored = {"exact_delta": 1, "paper_softmax": 4, "row_corrected": 8}
    assert stored.items() <= {mode.name: int(mode.flag) for mode in MODES}.items()
    assert not EVERY_FLAG & sum(RETIRED)
    assert [mode.flag for mode in MODES] == [flag for flag in Mode if flag]


def test_mode_names_parse_back_to_their_flags_in_any_order() -> None:
    assert sorted(all_modes()) == [flags for flags in range(EVERY_FLAG + 1) if flags & EVERY_FLAG == flags]
    for flags in all_modes():
        parts = [mode.name for mode in MODES if mode.flag & flags]
        assert parse_mode(mode_name(flags)) == flags
        assert parse_mode("+".join(reversed(parts)) or "plain") == flags
    assert parse_mode(DEFAULT_MITIGATION) in all_modes()


@pytest.mark.parametrize("flags", [*RETIRED, 8 + 16, 64, -1])
def test_unknown_mode_flags_are_rejected(flags: int) -> None:
    with pytest.raises(ValueError, match=rf"mode {flags} does not exist; allowed are plain, exact_delta"):
        mode_name(flags)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        *((name, "") for name in ("", "fast", "stable_softmax", "plain+exact_delta", "exact_delta+", "x" * 900)),
        ("row_corected", "row_corrected"),
        ("EXACT_DELTA", "exact_delta"),
        ("exact_delta+row_correct", "row_corrected"),
    ],
)
def test_unknown_mode_name_is_rejected_with_a_suggestion(name: str, suggestion: str) -> None:
    hint = f"did you mean '{suggestion}'\\? " if suggestion else ".*"
    with pytest.raises(ValueError, match=rf"does not exist; {hint}allowed are plain, .*joined by \+"):
        parse_mode(name)
    assert not is_mode(name)


def test_stronger_modes_end_and_add_only_modes_that_may_be_proposed() -> None:
    for name in MODE_NAMES:
        current, steps = name, 0
        while (following := stronger(current)) is not None:
            added = [mode for mode in modes_in(parse_mode(following)) if not mode.flag & parse_mode(current)]
            assert added
            assert all(mode.proposed for mode in added)
            current, steps = following, steps + 1
            assert steps <= len(MODES)
    assert stronger("paper_softmax") == "exact_delta+paper_softmax"
    assert stronger("of_tomorrow") is None


def test_orders_require_known_modes_but_reports_accept_unknown_ones() -> None:
    order, report = TypeAdapter(ModeName), TypeAdapter(ReportedModeName)
    assert order.validate_python("paper_softmax+exact_delta") == "exact_delta+paper_softmax"
    with pytest.raises(ValidationError, match="allowed are plain, exact_delta"):
        order.validate_python("of_tomorrow")
    assert report.validate_python("of_tomorrow") == "of_tomorrow"
    for invalid in ("", "no such", "x" * 65, "a\n", "<b>"):
        with pytest.raises(ValidationError):
            report.validate_python(invalid)
