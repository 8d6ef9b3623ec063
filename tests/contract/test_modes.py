"""The list of modes: its names, its flags and what follows from them."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from foreshock.contract.modes import (
    DEFAULT_MITIGATION,
    MODE_NAMES,
    MODES,
    Mode,
    check_served,
    is_mode,
    mode_name,
    modes_in,
    parse_mode,
    served_modes,
    stronger,
    with_mode,
)
from foreshock.contract.wire import ModeName, ReportedModeName

EVERY_FLAG = sum(mode.flag for mode in MODES)
ANY_FLAGS = st.integers(0, EVERY_FLAG)


def test_the_flags_that_runs_have_stored_keep_their_numbers_and_names() -> None:
    stored = {
        "exact_delta": 1,
        "stable_softmax": 2,
        "paper_softmax": 4,
        "row_corrected": 8,
        "centred_keys": 16,
        "centred_values": 32,
    }
    assert stored.items() <= {mode.name: int(mode.flag) for mode in MODES}.items()


def test_every_flag_has_one_entry_and_exclusion_goes_both_ways() -> None:
    assert [mode.flag for mode in MODES] == [flag for flag in Mode if flag]
    for one, other in combinations(MODES, 2):
        assert bool(one.excludes & other.flag) == bool(other.excludes & one.flag)


@given(ANY_FLAGS)
def test_a_name_and_its_flags_say_the_same_whatever_the_order_of_its_parts(flags: int) -> None:
    within = [mode for mode in MODES if mode.flag & flags]
    assert is_flags(flags) == (not any(one.excludes & other.flag for one in within for other in within))
    if not is_flags(flags):
        return
    parts = [mode.name for mode in within]
    assert parse_mode(mode_name(flags)) == flags
    assert parse_mode("+".join(reversed(parts)) or "plain") == flags


@pytest.mark.parametrize("flags", [6, 7, EVERY_FLAG + 1, EVERY_FLAG + 2, -1])
def test_flags_that_do_not_exist_or_exclude_each_other_have_no_name(flags: int) -> None:
    with pytest.raises(ValueError, match=rf"mode {flags} does not exist; allowed are plain, exact_delta"):
        mode_name(flags)


@pytest.mark.parametrize("name", ["", "fast", "plain+exact_delta", "exact_delta+", "EXACT_DELTA", "x" * 900])
def test_a_name_that_does_not_exist_is_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"does not exist; .*allowed are plain, .*not stable_softmax with paper_softmax"
    ):
        parse_mode(name)
    assert not is_mode(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [("row_corected", "row_corrected"), ("EXACT_DELTA", "exact_delta"), ("exact_delta+row_correct", "row_corrected")],
)
def test_a_misspelt_mode_is_answered_with_the_name_that_was_meant(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"does not exist; did you mean '{near}'\? allowed are"):
        parse_mode(name)


@given(ANY_FLAGS, ANY_FLAGS)
def test_what_is_added_to_a_mode_stays_and_takes_away_only_what_it_excludes(now: int, added: int) -> None:
    if not all(is_flags(each) for each in (now, added)):
        return
    mode = with_mode(now, Mode(added))
    assert mode & added == added
    excluded = [each.excludes for each in modes_in(added)]
    assert all(any(gone.flag & each for each in excluded) for gone in modes_in(now) if not gone.flag & mode)
    assert is_flags(mode)


def is_flags(flags: int) -> bool:
    try:
        modes_in(flags)
    except ValueError:
        return False
    return True


def test_served_modes_are_every_union_that_exists_of_what_kernels_compute() -> None:
    def served(flags: int) -> bool:
        return is_flags(flags) and all(mode.served for mode in modes_in(flags))

    assert served_modes() == [flags for flags in range(EVERY_FLAG + 1) if served(flags)]
    assert parse_mode(DEFAULT_MITIGATION) in served_modes()


def test_a_mode_that_no_kernel_serves_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreshock.contract.modes._SERVED", Mode.EXACT_DELTA | Mode.ROW_CORRECTED)
    check_served(Mode.EXACT_DELTA)
    with pytest.raises(ValueError, match="serves mode centred_keys; served are exact_delta, row_corrected"):
        check_served(Mode.CENTRED_KEYS | Mode.EXACT_DELTA)
    assert [mode_name(mode) for mode in served_modes()] == [
        "plain",
        "exact_delta",
        "row_corrected",
        "exact_delta+row_corrected",
    ]


def test_an_escalation_ends_and_proposes_only_what_may_be_proposed() -> None:
    for name in MODE_NAMES:
        now, steps = name, 0
        while (following := stronger(now)) is not None:
            added = [mode for mode in modes_in(parse_mode(following)) if not mode.flag & parse_mode(now)]
            assert added
            assert all(mode.proposed and mode.served for mode in added)
            now, steps = following, steps + 1
            assert steps <= len(MODES)
    assert stronger("stable_softmax") == "exact_delta+stable_softmax"
    assert stronger("of_tomorrow") is None


def test_orders_name_modes_that_exist_and_reports_may_name_those_of_a_newer_agent() -> None:
    order, report = TypeAdapter(ModeName), TypeAdapter(ReportedModeName)
    assert order.validate_python("stable_softmax+exact_delta") == "exact_delta+stable_softmax"
    with pytest.raises(ValidationError, match="allowed are plain, exact_delta"):
        order.validate_python("of_tomorrow")
    assert report.validate_python("of_tomorrow") == "of_tomorrow"
    for unfit in ("", "no such", "x" * 65, "a\n", "<b>"):
        with pytest.raises(ValidationError):
            report.validate_python(unfit)
