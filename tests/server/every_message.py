"""Every message that the service sends to people, made by the code that sends it."""

from collections.abc import Iterator
from typing import Any, Literal, get_args

from foreshock.contract.causes import CAUSES, IncidentCause, curable
from foreshock.contract.incident import Acknowledged, Incident, RunContext, SwitchOutcome, Warned, incidents
from foreshock.contract.modes import stronger
from foreshock.contract.switch_verdict import SignalGrowth
from foreshock.contract.wire import Outcome, Policy, Switched, Verdict
from foreshock.server.models import Verification
from foreshock.server.notifier import of_many, of_run, silent
from foreshock.server.runs.eventlog import switched_sentence
from foreshock.server.verification import judged_in_words

_FLOODS = {"one head": 1, "144 heads": 144}


def messages() -> Iterator[tuple[str, str]]:
    """Every message that can be sent to people, made by the code that sends them."""
    page = "https://foreshock.example.org"
    for cause in CAUSES:
        policies: tuple[Policy, ...] = get_args(Policy) if curable(cause) else ("auto",)
        for policy in policies:
            named = f"{cause}, policy {policy}" if curable(cause) else f"{cause}, any policy"
            for number, heads in _FLOODS.items():
                if number == "one head" or policy == "observe" or not curable(cause):
                    yield from _printed(
                        f"{named}, {number}", of_run("gpt2-small/7", [example(cause, policy, heads)], [], page)
                    )
    states: dict[str, dict[str, Any]] = {
        "switched": {"modes": {(4, 2): "row_corrected"}},
        "arrested": {"modes": {(4, 2): "row_corrected"}, "judged": [SwitchOutcome(None, 9000, arrested=True)]},
        "not arrested": {"modes": {(4, 2): "row_corrected"}, "judged": [SwitchOutcome(None, 9000, arrested=False)]},
        "acknowledged": {
            "acknowledged": [Acknowledged(cause="rounding", step=9000, who="ann", reason="on it", unix_seconds=0.0)]
        },
        "closed": {"state": "cleared"},
    }
    for state, changes in states.items():
        yield from _printed(
            f"rounding, {state}", of_run("gpt2-small/7", [example("rounding", "auto", 1, **changes)], [], page)
        )
    whole_run: tuple[IncidentCause, ...] = ("not finite", "other")
    for cause in whole_run:
        yield from _printed(f"{cause}, the whole run", of_run("gpt2-small/7", [example(cause, "observe", 0)], [], page))
    ended = of_run("gpt2-small/7", [example("not finite", "observe", 0)], [], page, ended=True)
    yield from _printed("not finite, of a run that has ended", ended)
    several = [example(cause, "observe", 3) for cause in CAUSES]
    yield from _printed("several causes in one run", of_run("gpt2-small/7", several, [], page))
    became: dict[Outcome, str] = {"applied": "ordered by ann: drift", "refused": "the layer runs no kernel of ours"}
    for outcome, reason in became.items():
        done = Switched(
            id="s", step=9000, command="c", outcome=outcome, heads=((4, 2),), before=("plain",),
            after=("row_corrected",), reason=reason,
        )  # fmt: skip
        yield from _printed(f"an order that was {outcome}", of_run("gpt2-small/7", [], [switched_sentence(done)], page))
    grown: dict[Verification, list[SignalGrowth]] = {
        "verified": [SignalGrowth("score offset", 0.9, 0.01)],
        "not arrested": [SignalGrowth("score offset", 0.9, 0.8)],
        "unknown": [],
    }
    for verdict, growth in grown.items():
        told = judged_in_words({(4, 2): growth}, "paper_softmax", 9000, verdict, 1000, active=True)
        yield from _printed(f"what became of a switch: {verdict}", of_run("gpt2-small/7", [], [told], page))
    escalated = stronger("paper_softmax")
    order = f"Command to switch layer 4 head 2 to {escalated} is proposed (service): not arrested, it grows on"
    yield from _printed("an order that waits for approval", of_run("gpt2-small/7", [], [order], page))
    fleet = {f"sweep/{number:03}": [example("rounding", "observe", 1 + number % 9)] for number in range(40)}
    yield from _printed("forty runs at once", of_many(fleet, {}, page))
    yield from _printed("one run has fallen silent", silent(["gpt2-small/7"], 5, page))
    yield from _printed("200 runs have fallen silent", silent([f"sweep/{number:03}" for number in range(200)], 5, page))


def _printed(title: str, message: str) -> Iterator[tuple[str, str]]:
    yield f"{title[0].upper()}{title[1:]}", message


def example(
    cause: IncidentCause,
    policy: Policy | None,
    heads: int,
    state: Literal["raised", "cleared"] = "raised",
    **known: Any,
) -> Incident:
    """An incident of a model with twelve heads a layer; of no head it is one of the whole run."""
    said: dict[str, Any] = {"severity": "warning", "cause": cause, "signal": "offset", "forecast_steps": 2600.0}
    said |= {"forecast_low_steps": 1900.0}
    if not heads:
        said |= dict.fromkeys(("forecast_steps", "forecast_low_steps"))
    if cause == "not finite":
        said |= {"severity": "critical", "cause": "other", "signal": "nonfinite", "forecast_steps": None}
    warned = [
        Warned(
            0,
            3375 + number,
            Verdict(
                id=f"w{number}", step=3375 + number, state=state, layer=(4 + number // 12) % 12 if heads else None,
                head=(2 + number) % 12 if heads else None, sentence="", **said
            ),
        )
        for number in range(heads or 1)
    ]  # fmt: skip
    [found] = incidents(warned, RunContext("row_corrected", policy=policy, scope="model", **known))
    return found
