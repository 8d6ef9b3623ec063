"""What a policy does about verdicts: the switches that they call for are made or proposed, or the heads refuse them."""

from collections.abc import Sequence

from foreshock.contract import wire
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.policy import decide, outcome_of
from foreshock.monitor.switch import Switchboard


def act(
    switchboard: Switchboard, verdicts: Sequence[wire.Verdict], config: AgentConfig, *, step: int
) -> list[wire.Switched]:
    """Act on `verdicts` at the step boundary after `step`, and return what was done; a new warning ends every hold."""
    switchboard.held -= {(v.layer, v.head) for v in verdicts if v.state == "raised"}
    modes = {head: mode for head, mode in switchboard.modes().items() if head not in switchboard.held}
    done: list[wire.Switched] = []
    for decision in decide(verdicts, config.mitigation, modes, config.switch_scope):
        outcome = outcome_of(decision, config.policy)
        if outcome is not None:
            verdict, heads, mode = decision
            named = f"policy {config.policy}"
            done += switchboard.follow(heads, mode, verdict, step=step, outcome=outcome, policy=named)
    return done
