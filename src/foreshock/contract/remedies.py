"""What is done about an incident, made of what is known of its heads and of orders.

Each cause is answered as if it were the only one (contract.decision.decision). If rounding and score growth are active
together, the answers are joined (contract.decision.in_order).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from foreshock.contract.causes import CAUSES, curable
from foreshock.contract.decision import Decision, Progress, cause_of, decision, in_order, is_active
from foreshock.contract.incident_form import Acknowledged, IncidentHead, SwitchOutcome, Warned
from foreshock.contract.modes import ROUNDING_ENDS, is_mode, parse_mode
from foreshock.contract.orders import Ordered
from foreshock.contract.wire import HeadRef, Policy


class Known(NamedTuple):
    """What is known of a run beside its warnings: the keywords of `incidents`."""

    modes: Mapping[HeadRef, str]
    judged: Sequence[SwitchOutcome]
    acknowledged: Sequence[Acknowledged]
    policy: Policy | None
    mitigation: str
    scope: str | None
    orders: Sequence[tuple[frozenset[HeadRef] | None, Ordered]] | None
    held: Collection[HeadRef]
    ended: bool
    clip: str | None


def answer(
    episode: Sequence[Warned],
    standing: Sequence[IncidentHead],
    known: Known,
    before_step: int,
) -> tuple[Decision, Ordered | None]:
    """What is done about what stands, and the order that shows how far that is."""
    if not standing:
        refs = {(one.verdict.layer, one.verdict.head) for one in episode}
        applied = (
            order
            for heads, order in known.orders or ()
            if order.state == "applied" and (heads is None or not refs.isdisjoint(heads))
        )
        order = next(applied, None)
        way = "" if order is None else f" {order.way}."
        return Decision("none", f"All warnings are quiet.{way}", "Nothing."), order
    decided: list[Decision] = []
    order, finite = None, True
    for own in [one for one in CAUSES if any(one in head.causes for head in standing)]:
        heads = [head for head in standing if own in head.causes]
        progress = progress_of(heads) if curable(own) else "unswitched"
        if curable(own):
            rejected = {
                (one.verdict.layer, one.verdict.head)
                for one in episode
                if one.rejected and is_active(one.verdict) and cause_of(one.verdict) == own
            }
            order = _order(heads, progress, known.orders or (), rejected, known.held)
            finite = all(head.signal != "nonfinite" for head in heads)
        decided.append(
            decision(
                own,
                known.policy,
                mitigation=known.mitigation,
                scope=known.scope,
                progress=progress,
                switched=switched_of(heads),
                heads=len(heads),
                before_step=before_step,
                finite=finite,
                orders_known=known.orders is not None,
                order=order if curable(own) else None,
                over=bool(heads) and all(falls(head.evidence) for head in heads),
                ended=known.ended,
                clip=known.clip,
                warning=bool(heads) and all(head.severity != "critical" for head in heads),
            )
        )
    what, *more = decided
    return (in_order(what, more[0]) if more and finite and not known.ended else what), order


def _cures(order: Ordered) -> bool:
    return is_mode(order.mode) and bool(parse_mode(order.mode) & ROUNDING_ENDS)


def switched_of(heads: Sequence[IncidentHead]) -> int:
    return sum(head.state not in ("quiet", "unswitched") for head in heads)


def falls(evidence: Mapping[str, float]) -> bool:
    """Whether what had grown in a head became less over the window: offset and largest score, as far as known."""
    both = [(evidence.get(key), evidence.get(f"{key}_before")) for key in ("offset", "score")]
    known = [(abs(now), abs(before)) for now, before in both if now is not None and before is not None]
    return bool(known) and all(now < before for now, before in known)


def _order(
    standing: Sequence[IncidentHead],
    progress: Progress,
    orders: Sequence[tuple[frozenset[HeadRef] | None, Ordered]],
    rejected: Collection[tuple[int | None, int | None]],
    held: Collection[HeadRef],
) -> Ordered | None:
    """The newest order that shows where the incident's heads stand.

    Of heads that are not switched: the newest one for any of them. A rejection or a switch that was taken back counts
    while it holds for all of them. Of heads that are switched: the newest one that did it, or a proposal of more.
    A proposal that waits goes before newer orders, since it is what people can answer.
    """
    bare = {(head.layer, head.head) for head in standing if head.state == "unswitched"}
    own = bare or {(head.layer, head.head) for head in standing}
    for heads, order in sorted(orders, key=lambda each: each[1].state != "proposed"):
        if heads is not None and own.isdisjoint(heads):
            continue
        cures = _cures(order)
        if progress != "unswitched":
            counts = cures and order.state in ("applied", "proposed")
        elif order.state == "rejected":
            counts = own <= set(rejected)
        elif order.state == "applied":
            counts = not cures and own <= set(held)
        else:
            counts = cures
        if counts:
            return order
    return None


def progress_of(standing: Sequence[IncidentHead]) -> Progress:
    states = {head.state for head in standing}
    if "not arrested" in states:
        return "not arrested"
    if not states or "unswitched" in states:
        return "unswitched"
    return "arrested" if states == {"arrested"} else "switched"
