"""Notifications about incidents: once each, grouped if they occur together, and of limited length."""

import json
import re
import time
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from sqlalchemy import update
from tests.overrides import settings_with
from tests.server.incident_examples import example

from foreshock.contract.causes import CAUSES
from foreshock.contract.incident import RunContext, SwitchOutcome, Warned, incidents
from foreshock.contract.metrics.run_metrics import SILENT_SECONDS
from foreshock.contract.wire import Finished, Policy, Verdict
from foreshock.server.notifier import LONGEST, Notifier, messages_of, silent, words_of
from foreshock.server.settings import Settings
from foreshock.server.store.schema import runs, service_state
from foreshock.server.testing import FakeRank


class FakeOutgoing:
    """Records messages instead of sending them."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def post(self, _url: str, body: bytes) -> int:
        self.sent.append(json.loads(body)["message"])
        return 200


async def notifier_of(service: Any, out: FakeOutgoing, gather: float = 0.0) -> Notifier:
    url = SecretStr("https://hooks.example.org/x")
    settings = settings_with(
        Settings,
        notify_webhook_url=url,
        notify_hosts=("hooks.example.org",),
        notify_gather_seconds=gather,
        token=SecretStr("a-secret-of-sixteen-or-more"),
        public_url="https://foreshock.example.org",
    )
    notifier = Notifier(service.app.state.store, settings, out)  # type: ignore[arg-type]
    await notifier.turn()
    return notifier


async def test_incident_changes_are_sent_once_each_but_growth_in_heads_is_not(service: Any) -> None:
    out, rank = FakeOutgoing(), FakeRank(layers=12, heads=tuple(range(12)))
    notifier = await notifier_of(service, out)
    await service.store(rank, rank.started(policy="observe"), rank.sample(1), rank.verdict(1, name="first"))
    await notifier.turn()
    for layer in range(12):
        verdicts = [rank.verdict(20 + layer, layer=layer, head=h, name=f"l{layer}h{h}") for h in range(12)]
        await service.store(rank, *verdicts)
    await notifier.turn()
    assert len(out.sent) == 1
    await service.store(rank, rank.verdict(90, name="first", state="updated", severity="critical"))
    await notifier.turn()
    acknowledgement = {"who": "ann", "reason": "on it", "incident": "rounding"}
    await service.client.post("/v1/runs/run-1/acknowledge", json=acknowledgement)
    await notifier.turn()
    await notifier.turn()
    assert [message.split(":")[0] for message in out.sent] == ["Warning", "Critical", "Critical, acknowledged"]
    start = "Critical: Run run-1: Rounding makes attention scores drift in 144 heads of layers 0 to 11"
    assert (out.sent[1].startswith(start), len(out.sent[1]) < LONGEST) == (True, True)
    assert "To do: Switch every head to exact_delta." in out.sent[1]
    assert out.sent[1].endswith("https://foreshock.example.org/?runs=run-1&head=0.2&metric=head.score_offset")


async def test_notification_waits_for_the_gather_time(service: Any) -> None:
    out, rank = FakeOutgoing(), FakeRank()
    notifier = await notifier_of(service, out, gather=60.0)
    await service.store(rank, rank.started(), rank.verdict(5))
    await notifier.turn()
    assert out.sent == []
    type(notifier.settings).notify_gather_seconds = 0.0  # settings_with made a separate class
    await notifier.turn()
    assert len(out.sent) == 1


async def test_many_silent_runs_are_reported_once_in_one_message(service: Any) -> None:
    out, now = FakeOutgoing(), time.time()
    notifier = await notifier_of(service, out, gather=5.0)
    for number in range(200):
        rank = FakeRank(run=f"fleet/run-{number:03}", layers=1, heads=(0,))
        ended = [Finished(step=2, unix_seconds=1.0, status="completed")] if number >= 190 else []
        await service.store(rank, rank.started(), *ended)
    with service.app.state.store.writer.engine.begin() as connection:
        for number in range(200):  # all last heartbeats are within ten seconds
            heard = now - SILENT_SECONDS - 40 + number % 10
            own = runs.c.name == f"fleet/run-{number:03}"
            connection.execute(update(runs).where(own).values(last_seen=heard))
        own = service_state.c.key == "notified silence"
        connection.execute(update(service_state).where(own).values(value=now - SILENT_SECONDS - 60))
    for _ in range(3):
        await notifier.turn()
    [message] = out.sent
    assert message.startswith("Warning: 190 runs have sent nothing for 5 minutes: fleet/run-000, ")
    assert "and 184 more" in message
    assert len(message) < LONGEST


async def test_silent_run_is_reported_after_forward_clock_jump_is_corrected(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may boot with a wrong clock; times stored then must not hide silent runs for a day."""
    correct_time, ahead = time.time, [86_400.0]
    monkeypatch.setattr(time, "time", lambda: correct_time() + ahead[0])
    out, rank = FakeOutgoing(), FakeRank(run="clocked", layers=1, heads=(0,))
    notifier = await notifier_of(service, out)
    await service.store(rank, rank.started(), rank.sample(1))
    ahead[0] += 1.0
    await notifier.turn()
    await service.store(rank, rank.verdict(1, head=0))
    ahead[0] = 0.0
    await notifier.turn()
    assert "clocked" in out.sent.pop()
    await service.store(rank, rank.sample(2))
    assert (await service.get("/v1/runs/clocked"))["last_seen_unix_seconds"] <= time.time()
    await notifier.turn()
    ahead[0] = SILENT_SECONDS + 60.0
    await notifier.turn()
    assert (await service.get("/v1/runs/clocked"))["condition"] == "silent"
    [message] = out.sent
    assert "clocked has sent nothing" in message


PAGE = "https://page.example/"
SWITCHED = {(4, 2): "row_corrected"}
STATES: dict[str, dict[str, Any]] = {
    "open": {},
    "switched": {"modes": SWITCHED},
    "arrested": {"modes": SWITCHED, "judged": [SwitchOutcome(None, 9000, arrested=True)]},
    "not arrested": {"modes": SWITCHED, "judged": [SwitchOutcome(None, 9000, arrested=False)]},
    "closed": {"state": "cleared"},
}


def message_for(run: str, found: Any, **more: Any) -> str:
    [(_, message)] = messages_of({run: found}, {}, PAGE, **more)
    return message


@pytest.mark.parametrize(
    ("cause", "policy", "state", "heads"), list(product(CAUSES, get_args(Policy), STATES, (0, 1, 144)))
)
def test_message_is_complete_and_ends_with_link(cause: Any, policy: Any, state: str, heads: int) -> None:
    for ended in ([], ["gpt2-small/7"]):
        message = message_for("gpt2-small/7", [example(cause, policy, heads, **STATES[state])], ended=ended)
        assert 0 < len(message) <= LONGEST
        assert not re.search(r"None|nan\b|  |\{|<built|object at", message)
        assert message.splitlines()[-1].startswith(f"Evidence and switch: {PAGE}?runs=gpt2-small%2F7")


def test_message_about_nonfinite_run_names_the_whole_run() -> None:
    found = [example("not finite", "auto", 0)]
    [(_, message)] = messages_of({f"sweep/{number}": found for number in range(5)}, {}, "")
    assert message.splitlines()[1] == "sweep/0: critical, not finite, the whole run since step 3,375"


@pytest.mark.promise("S24")
def test_message_under_observe_gives_switch_command_unless_run_has_ended() -> None:
    found = [example("rounding", "observe", 1)]
    command = "foreshock switch 'team/run 1' --mode row_corrected --reason \"rounding\""
    assert f"To do: Switch every head to row_corrected. Type: {command}" in message_for("team/run 1", found)
    heads, _, _, to_do = words_of("team/run 1", found[0])
    assert (heads, to_do.endswith(command)) == ("layer 4 head 2", True)
    for policy in ("approve", "auto"):
        assert "Type:" not in words_of("a", example("rounding", policy, 1))[3]
    ended = message_for("a", found, ended=["a"])
    assert ("The run has ended." in ended, "Type:" in ended) == (True, False)


def test_message_about_one_silent_run_links_to_that_run() -> None:
    assert silent(["team/run 1"], 5, PAGE).endswith("\nLast steps: https://page.example/?runs=team%2Frun%201")
    assert silent(["a", "b"], 5, PAGE).endswith("\nAll runs: https://page.example/")


@pytest.mark.parametrize(
    ("raised", "updated", "steps"), [(300, 300, ""), (9000, 9400, "&steps=8000-"), (9000, 12_000, "&steps=3000-")]
)
def test_message_link_selects_first_head_metric_and_steps_before_incident(
    raised: int, updated: int, steps: str
) -> None:
    def verdict(head: int, left: float) -> Verdict:
        fields: Any = {"cause": "score growth", "signal": "score", "sentence": "grows", "forecast_steps": left}
        return Verdict(id=f"w{head}", step=updated, state="raised", severity="warning", layer=4, head=head, **fields)

    warned = [Warned(0, raised, verdict(2, 900.0)), Warned(0, raised, verdict(6, 700.0))]
    message = message_for("team/run 1", incidents(warned, RunContext("row_corrected", policy="observe")))
    address = f"{PAGE}?runs=team%2Frun%201&head=4.6&metric=head.score_max"
    assert message.splitlines()[-1] == f"Evidence and switch: {address}{steps}"


@given(
    names=st.lists(st.text("abc/.:-", min_size=1, max_size=128), min_size=1, max_size=40, unique=True),
    causes=st.lists(st.sampled_from(list(CAUSES)), min_size=1, max_size=3, unique=True),
    words=st.lists(st.text(max_size=600), max_size=9),
)
def test_message_never_exceeds_length_limit_and_keeps_its_link(
    names: list[str], causes: list[Any], words: list[str]
) -> None:
    found = [example(cause, "approve", 45) for cause in causes]
    page = "https://foreshock.example.org/" + "p" * 400
    messages = messages_of(dict.fromkeys(names, found), dict.fromkeys(names, words), page)
    for _, message in [*messages, ("", silent(names, 5, page))]:
        assert len(message) < LONGEST
        assert page in message.splitlines()[-1]
