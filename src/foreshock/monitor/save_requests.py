"""At a warning the trainer is asked for a checkpoint, once for each incident."""

from collections.abc import Sequence

from foreshock.contract import wire
from foreshock.contract.causes import IncidentCause
from foreshock.contract.decision import cause_of, is_active


class SaveRequests:
    """Asks once for each cause, and again only after every warning of that cause was cleared. A loss or gradient that
    is not finite asks for nothing: its checkpoint would hold the harm."""

    def __init__(self, asks: bool) -> None:
        self._asks = asks
        self._asked: set[IncidentCause] = set()
        self._wanted = False

    def follow(self, raised: Sequence[wire.Verdict], active: Sequence[wire.Verdict]) -> None:
        """What was raised in this sample, and every warning that is active after it."""
        fresh = {cause_of(one) for one in raised if one.state == "raised" and one.severity != "info"} - {"not finite"}
        self._wanted |= self._asks and bool(fresh - self._asked)
        self._asked = (self._asked | fresh) & {cause_of(one) for one in (*active, *raised) if is_active(one)}

    def take(self) -> bool:
        """Whether a checkpoint is wanted; true once."""
        wanted, self._wanted = self._wanted, False
        return wanted
