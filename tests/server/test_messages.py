"""What the service sends to people: few words, the worst first, and a link that is never cut off."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract.incident import RunContext, Warned, incidents
from foreshock.contract.wire import Verdict
from foreshock.server.notifier import LONGEST, messages_of, silent, words_of


def test_a_fleet_whose_runs_compute_what_is_not_finite_is_not_told_of_heads_that_nobody_warned_about() -> None:
    nan = Verdict(id="n", step=70, state="raised", severity="critical", cause="other", signal="nonfinite", sentence="")
    found = incidents([Warned(0, 70, nan)], RunContext("row_corrected", policy="auto"))
    [(_, message)] = messages_of({f"sweep/{number}": found for number in range(5)}, {}, "")
    assert message.splitlines()[1] == "sweep/0: critical, not finite, the whole run since step 70"


def drifting(policy: Any = "observe") -> Any:
    fields: Any = {"cause": "rounding", "signal": "offset", "sentence": "drifts"}
    told = Verdict(id="w", step=9000, state="raised", severity="warning", layer=4, head=2, **fields)
    return incidents([Warned(0, 9000, told)], RunContext("row_corrected", policy=policy))


@pytest.mark.promise("S24")
def test_a_switch_that_is_left_to_people_is_told_with_the_command_to_type() -> None:
    command = "foreshock switch 'team/run 1' --mode row_corrected --reason \"rounding\""
    [(_, message)] = messages_of({"team/run 1": drifting()}, {}, "")
    assert f"To do: Switch every head to row_corrected. Type: {command}" in message
    heads, _, _, to_do = words_of("team/run 1", drifting()[0])
    assert heads == "layer 4 head 2"
    assert to_do.endswith(command)
    for policy in ("approve", "auto"):
        assert "Type:" not in words_of("a", drifting(policy)[0])[3]


@pytest.mark.promise("S24")
def test_a_message_of_a_run_that_has_ended_says_so_and_asks_for_no_command() -> None:
    [(_, message)] = messages_of({"a": drifting()}, {}, "", ended=["a"])
    assert "The run has ended." in message
    assert "Type:" not in message


def test_the_message_of_one_silent_run_opens_that_run() -> None:
    assert silent(["team/run 1"], 5, "https://page.example/").endswith(
        "\nLast steps: https://page.example/?runs=team%2Frun%201"
    )
    assert silent(["a", "b"], 5, "https://page.example/").endswith("\nAll runs: https://page.example/")


@pytest.mark.parametrize(
    ("raised", "said", "steps"), [(300, 300, ""), (9000, 9400, "&steps=8000-"), (9000, 12_000, "&steps=3000-")]
)
def test_a_message_opens_the_first_head_its_metric_and_the_steps_from_before_its_incident(
    raised: int, said: int, steps: str
) -> None:
    def verdict(head: int, left: float) -> Verdict:
        fields: Any = {"cause": "score growth", "signal": "score", "sentence": "grows", "forecast_steps": left}
        return Verdict(id=f"w{head}", step=said, state="raised", severity="warning", layer=4, head=head, **fields)

    warned = [Warned(0, raised, verdict(2, 900.0)), Warned(0, raised, verdict(6, 700.0))]
    found = incidents(warned, RunContext("row_corrected", policy="observe"))
    [(_, message)] = messages_of({"team/run 1": found}, {}, "https://page.example/")
    address = "https://page.example/?runs=team%2Frun%201&head=4.6&metric=head.score_max"
    assert message.splitlines()[-1] == f"Evidence and switch: {address}{steps}"


@given(
    names=st.lists(st.text("abc/.:-", min_size=1, max_size=128), min_size=1, max_size=40, unique=True),
    causes=st.lists(st.sampled_from(["rounding", "score growth", "other"]), min_size=1, max_size=3, unique=True),
    words=st.lists(st.text(max_size=600), max_size=9),
)
def test_no_message_is_longer_than_people_read_and_each_keeps_its_link(
    names: list[str], causes: list[Any], words: list[str]
) -> None:
    warned = [
        Warned(0, 5, Verdict(id=f"{cause[0]}{head}", step=9, state="raised", severity="warning", layer=head, head=0,
                             cause=cause, signal="score", sentence="x" * 500))
        for cause in causes
        for head in range(0, 90, 2)
    ]  # fmt: skip
    found = incidents(warned, RunContext("row_corrected", policy="approve"))
    page = "https://foreshock.example.org/" + "p" * 400
    told = messages_of(dict.fromkeys(names, found), dict.fromkeys(names, words), page)
    for _, message in [*told, ("", silent(names, 5, page))]:
        assert len(message) < LONGEST
        assert page in message.splitlines()[-1]
