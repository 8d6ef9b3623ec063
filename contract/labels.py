"""Words that agents say and that become labels of time series: closed sets. What is not in them is shown as "other"."""

from collections.abc import Collection
from typing import Final

OTHER: Final = "other"
SIGNALS: Final = ("offset", "score", "ties", "norm", "nonfinite")
"""Signals that trip (wire.Verdict.signal)."""
DROP_REASONS: Final = (
    "queue_full",
    "sender_off",
    "spool_full",
    "spool_lost",
    "unbuilt",
    *(f"refused_{status}" for status in (400, 401, 403, 404, 405, 409, 413, 415, 422)),
)
"""Why an agent loses events (wire.AgentHealth.dropped)."""
GUARDED: Final = (
    "agent",
    "loss",
    "collector",
    "sample",
    "detectors",
    "thinning",
    "policy",
    "voice",
    "switch",
    "norms",
    "sinks",
    "sender",
    "mirror",
    "tracker",
)
"""Parts of an agent that run under a guard of their own."""
FAULT_COMPONENTS: Final = (*GUARDED, "probe", "spool")
"""Parts of an agent that contain their faults (wire.AgentHealth.faults)."""


def known(word: str, words: Collection[str]) -> str:
    """The word itself if it is one of `words`, else "other"."""
    return word if word in words else OTHER
