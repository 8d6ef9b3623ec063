"""Incidents of a model with twelve heads per layer, for tests of texts about incidents."""

from typing import Any, Literal

from foreshock.contract.causes import IncidentCause
from foreshock.contract.incident import Incident, RunContext, Warned, incidents
from foreshock.contract.wire import Policy, Verdict


def example(
    cause: IncidentCause,
    policy: Policy | None,
    heads: int,
    state: Literal["raised", "cleared"] = "raised",
    **known: Any,
) -> Incident:
    """An incident of this many heads, or of the whole run if `heads` is 0."""
    fields: dict[str, Any] = {"severity": "warning", "cause": cause, "signal": "offset", "forecast_steps": 2600.0}
    fields |= {"forecast_low_steps": 1900.0}
    if not heads:
        fields |= dict.fromkeys(("forecast_steps", "forecast_low_steps"))
    if cause == "not finite":
        fields |= {"severity": "critical", "cause": "other", "signal": "nonfinite", "forecast_steps": None}
    warned = [
        Warned(
            0,
            3375 + number,
            Verdict(
                id=f"w{number}", step=3375 + number, state=state, layer=(4 + number // 12) % 12 if heads else None,
                head=(2 + number) % 12 if heads else None, sentence="", **fields
            ),
        )
        for number in range(heads or 1)
    ]  # fmt: skip
    [found] = incidents(warned, RunContext("row_corrected", policy=policy, scope="model", **known))
    return found
