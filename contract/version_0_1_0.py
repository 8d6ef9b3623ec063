"""Messages as version 0.1.0 reads them: it refuses whatever it does not know, and cannot be told otherwise any more.

0.1.0 stands here, and wherever else in the code one build differs from another, for the first builds: those up to
commit ea6e79e, whose batches carry no `revision`. Nothing is released yet, and later builds call themselves 0.1.0 too;
what people read therefore says "first build". A service answers an agent of one so; an agent sends so what a service
has refused. Later builds skip what they do not know (wire.Message), and need nothing of this.
"""

import json
from typing import Any, Final

from pydantic_core import from_json

from foreshock.contract.wire import Array

SLOTS: Final = 13
MODES: Final = frozenset(
    {
        "plain",
        "exact_delta",
        "stable_softmax",
        "paper_softmax",
        "exact_delta+stable_softmax",
        "exact_delta+paper_softmax",
    }
)
_CAUSES: Final = ("rounding", "score growth", "other")
_BATCH: Final = ("wire", "run", "rank", "boot", "sequence")
_LAYER: Final = ("layer", "name", "heads", "kv_heads", "head_dim", "served_by", "sampled")
_ACK: Final = ("boot", "acknowledged")
_COMMAND: Final = (
    *("id", "action", "heads", "mode", "expect", "reason", "issued_by"),
    *("expires_unix_seconds", "expires_step", "dry_run"),
)
_NORMS: Final = ("query_norm", "key_norm", "query_key_norm")
_EVENTS: Final = {
    "started": (
        *("step", "unix_seconds", "world_size", "layers", "policy", "numerics", "mitigation", "labels", "versions"),
    ),
    "sample": (
        *("step", "since_step", "unix_seconds", "states", "modes", *_NORMS, "loss", "loss_max", "loss_nonfinite_steps"),
        *("grad_norm", "grad_norm_nonfinite_steps", "learning_rate", "step_seconds", "agent_seconds", "risk"),
    ),
    "verdict": (
        *("id", "step", "state", "severity", "layer", "head", "cause", "signal", "evidence"),
        *("forecast_steps", "forecast_low_steps", "forecast_high_steps", "sentence"),
    ),
    "switched": ("id", "step", "command", "verdict", "outcome", "heads", "before", "after", "reason"),
    "health": ("step", "dropped", "faults", "retries", "spool_bytes", "oldest_unsent_seconds"),
    "grams": ("step", "began_step", "layer", "heads", "head_dim", "inputs", "all_inputs", "query", "key"),
    "finished": ("step", "unix_seconds", "status"),
}


def batch(payload: bytes) -> bytes | None:
    """A batch in JSON without what 0.1.0 does not know; None when it is so already, and when nothing is left of it.

    Slots that were appended since are cut off. A switch from or to a mode that was added since is told in words: the
    service would hand the mode's name to the other ranks, whose acknowledgements it could not write any more.
    """
    said = from_json(payload)
    events = [_event(event) for event in said["events"] if event["kind"] in _EVENTS]
    known = {**_only(said, _BATCH), "events": events}
    return _json(known) if events and known != said else None


def ack(payload: bytes) -> bytes:
    """An acknowledgement in JSON without what 0.1.0 does not know. Its commands name modes of 0.1.0 already."""
    said = from_json(payload)
    return _json({**_only(said, _ACK), "commands": [_only(command, _COMMAND) for command in said["commands"]]})


def _json(said: dict[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":"), allow_nan=False).encode()


def _only(said: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: said[name] for name in names if name in said}


def _event(event: dict[str, Any]) -> dict[str, Any]:
    kind = event["kind"]
    known = {"kind": kind, **_only(event, _EVENTS[kind])}
    if kind == "sample" and known.get("states") is not None:
        words = Array.model_validate(known["states"]).numpy()
        known["states"] = Array.of(words[:, :SLOTS]).model_dump(mode="json")
    elif kind == "started":
        known["layers"] = [_only(layer, _LAYER) for layer in known["layers"]]
        if known.get("mitigation") not in MODES:
            known.pop("mitigation", None)
    elif kind == "verdict" and known["cause"] not in _CAUSES:
        known["cause"] = "other"
    elif kind == "switched" and not {*known["before"], *known["after"]} <= MODES:
        changes = zip(known["heads"], known["before"], known["after"], strict=True)
        said = ", ".join(f"layer {at[0]} head {at[1]} from {before} to {after}" for at, before, after in changes)
        known |= {"heads": [], "before": [], "after": [], "reason": f"{known['reason']} ({said})"[:500]}
    return known
