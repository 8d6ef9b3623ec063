"""What is done about an incident: its remedies in their order, made of what is known of its heads and of orders.

Each cause is answered as if it stood alone (contract.decision.decision). Where rounding and score growth stand at one
time, one goes after the other (contract.decision.in_order).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from foreshock.contract.causes import CAUSES, IncidentCause, RemedyName, curable
from foreshock.contract.decision import Decision, Progress, cause_of, decision, in_order
from foreshock.contract.incident_form import Acknowledged, IncidentHead, Remedy, RemedyState, SwitchOutcome, Warned
from foreshock.contract.modes import ROUNDING_ENDS, is_mode, parse_mode, stronger
from foreshock.contract.orders import ORDERS, Ordered, action_of
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
    cause: IncidentCause,
    episode: Sequence[Warned],
    standing: Sequence[IncidentHead],
    known: Known,
    before_step: int,
) -> tuple[Decision, Ordered | None, list[Remedy]]:
    """What is done about what stands, the order that shows how far that is, and the remedies in their order."""
    decided: dict[IncidentCause, tuple[Decision, Ordered | None]] = {}
    judged = finite = True
    for own in [one for one in CAUSES if any(one in head.causes for head in standing)] or [cause]:
        heads = [head for head in standing if own in head.causes]
        progress = progress_of(heads) if curable(own) else "unswitched"
        rejected = {
            (one.verdict.layer, one.verdict.head)
            for one in episode
            if one.verdict.state != "cleared" and one.rejected and cause_of(one.verdict) == own
        }
        order, given = None, [each for each in known.orders or () if action_of(each[1].mode) == CAUSES[own].remedy]
        if curable(own):
            order = _order(heads, progress, given, rejected, known.held)
            judged = all(_is_judged(head, known, rejected) for head in heads)
            finite = all(head.signal != "nonfinite" for head in heads)
        elif CAUSES[own].remedy == "qk_clip":
            order = _clip_order(heads, given, rejected)
        what = decision(
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
            order=order,
            over=bool(heads) and all(falls(head.evidence) for head in heads),
            ended=known.ended,
            clip=known.clip,
        )
        decided[own] = what, order
    turns: dict[RemedyName, RemedyState] = {"switch": "done" if judged else "now"}
    if known.clip is not None:
        turns["qk_clip"] = "done" if known.clip == "on" else "now" if judged else "later"
    remedies = [
        Remedy(name=each.remedy, state=turns[each.remedy], words=each.helps)
        for each in (CAUSES[own] for own in decided)
        if each.remedy in turns and standing and finite and not known.ended
    ]
    (what, order), *more = decided.values()
    if not more or not finite:
        return what, order, remedies
    [(growth, clip)] = more
    return in_order(what, growth, known.clip, judged=judged), (clip or order) if judged else order, remedies


def _is_judged(head: IncidentHead, known: Known, rejected: Collection[tuple[int | None, int | None]]) -> bool:
    """Whether a head that rounding drives waits for no switch, nor for the verdict on one, nor for a stronger one."""
    if head.layer is None or head.head is None or head.state not in ("arrested", "not arrested"):
        return False
    ref = head.layer, head.head
    left = stronger(known.modes.get(ref, "plain")) if head.state == "not arrested" else None
    if left is not None and ref not in rejected:
        return False
    newest = next((one for heads, one in known.orders or () if _counts(one) and (heads is None or ref in heads)), None)
    return newest is None or (newest.state == "applied" and newest.verification is not None) or not _cures(newest)


def _counts(order: Ordered) -> bool:
    """Whether an order has made a head what it is, or may yet."""
    return order.mode not in ORDERS and order.state in ("proposed", "pending", "delivered", "applied")


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


def _clip_order(
    standing: Sequence[IncidentHead],
    orders: Sequence[tuple[frozenset[HeadRef] | None, Ordered]],
    rejected: Collection[tuple[int | None, int | None]],
) -> Ordered | None:
    """The newest order about QK-Clip, a proposal that waits first; a rejection counts while it holds for all heads."""
    refused = {(head.layer, head.head) for head in standing} <= set(rejected)
    clips = [order for _, order in orders if order.state != "rejected" or refused]
    return min(clips, key=lambda order: order.state != "proposed", default=None)


def progress_of(standing: Sequence[IncidentHead]) -> Progress:
    states = {head.state for head in standing}
    if "not arrested" in states:
        return "not arrested"
    if not states or "unswitched" in states:
        return "unswitched"
    return "arrested" if states == {"arrested"} else "switched"
