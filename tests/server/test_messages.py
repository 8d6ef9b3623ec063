"""What the service sends to people: few words, the worst first, the command to type, and a link that is never cut."""

import re
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.incident_examples import example

from foreshock.contract.causes import CAUSES
from foreshock.contract.incident import RunContext, SwitchOutcome, Warned, incidents
from foreshock.contract.wire import Policy, Verdict
from foreshock.server.notifier import LONGEST, messages_of, silent, words_of

PAGE = "https://page.example/"
SWITCHED = {(4, 2): "row_corrected"}
STATES: dict[str, dict[str, Any]] = {
    "open": {},
    "switched": {"modes": SWITCHED},
    "arrested": {"modes": SWITCHED, "judged": [SwitchOutcome(None, 9000, arrested=True)]},
    "not arrested": {"modes": SWITCHED, "judged": [SwitchOutcome(None, 9000, arrested=False)]},
    "closed": {"state": "cleared"},
}


def of_run(run: str, found: Any, **more: Any) -> str:
    [(_, message)] = messages_of({run: found}, {}, PAGE, **more)
    return message


@pytest.mark.parametrize(
    ("cause", "policy", "state", "heads"), list(product(CAUSES, get_args(Policy), STATES, (0, 1, 144)))
)
def test_no_message_has_a_hole_and_each_ends_with_where_to_look(
    cause: Any, policy: Any, state: str, heads: int
) -> None:
    for ended in ([], ["gpt2-small/7"]):
        message = of_run("gpt2-small/7", [example(cause, policy, heads, **STATES[state])], ended=ended)
        assert 0 < len(message) <= LONGEST
        assert not re.search(r"None|nan\b|  |\{|<built|object at", message)
        assert message.splitlines()[-1].startswith(f"Evidence and switch: {PAGE}?runs=gpt2-small%2F7")


def test_a_fleet_whose_runs_compute_what_is_not_finite_is_not_told_of_heads_that_nobody_warned_about() -> None:
    found = [example("not finite", "auto", 0)]
    [(_, message)] = messages_of({f"sweep/{number}": found for number in range(5)}, {}, "")
    assert message.splitlines()[1] == "sweep/0: critical, not finite, the whole run since step 3,375"


@pytest.mark.promise("S24")
def test_a_switch_that_is_left_to_people_is_told_with_the_command_to_type_unless_the_run_has_ended() -> None:
    found = [example("rounding", "observe", 1)]
    command = "foreshock switch 'team/run 1' --mode row_corrected --reason \"rounding\""
    assert f"To do: Switch every head to row_corrected. Type: {command}" in of_run("team/run 1", found)
    heads, _, _, to_do = words_of("team/run 1", found[0])
    assert (heads, to_do.endswith(command)) == ("layer 4 head 2", True)
    for policy in ("approve", "auto"):
        assert "Type:" not in words_of("a", example("rounding", policy, 1))[3]
    ended = of_run("a", found, ended=["a"])
    assert ("The run has ended." in ended, "Type:" in ended) == (True, False)


def test_the_message_of_one_silent_run_opens_that_run() -> None:
    assert silent(["team/run 1"], 5, PAGE).endswith("\nLast steps: https://page.example/?runs=team%2Frun%201")
    assert silent(["a", "b"], 5, PAGE).endswith("\nAll runs: https://page.example/")


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
    message = of_run("team/run 1", incidents(warned, RunContext("row_corrected", policy="observe")))
    address = f"{PAGE}?runs=team%2Frun%201&head=4.6&metric=head.score_max"
    assert message.splitlines()[-1] == f"Evidence and switch: {address}{steps}"


@given(
    names=st.lists(st.text("abc/.:-", min_size=1, max_size=128), min_size=1, max_size=40, unique=True),
    causes=st.lists(st.sampled_from(list(CAUSES)), min_size=1, max_size=3, unique=True),
    words=st.lists(st.text(max_size=600), max_size=9),
)
def test_no_message_is_longer_than_people_read_and_each_keeps_its_link(
    names: list[str], causes: list[Any], words: list[str]
) -> None:
    found = [example(cause, "approve", 45) for cause in causes]
    page = "https://foreshock.example.org/" + "p" * 400
    told = messages_of(dict.fromkeys(names, found), dict.fromkeys(names, words), page)
    for _, message in [*told, ("", silent(names, 5, page))]:
        assert len(message) < LONGEST
        assert page in message.splitlines()[-1]
