"""QK-Clip as a proposal: only where it has its turn among an incident's remedies, whoever asks for it.

It scales weights for good. Where rounding drives heads too, it waits for the verdict on their switch
(contract.decision.in_order): what an agent proposes before that is left out, and the service proposes it afterwards.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, select

from foreshock.contract.incident import Incident
from foreshock.contract.orders import action_of
from foreshock.server.commands.bounds import refusal
from foreshock.server.commands.lifecycle import propose
from foreshock.server.runs.incidents import incidents_of
from foreshock.server.settings import Settings
from foreshock.server.store.schema import runs


def may_be_proposed(connection: Connection, run_id: int, action: str, verify_steps: int) -> bool:
    """Whether an incident of the run calls for it. verify_steps: as for `incidents_of`."""
    found = incidents_of(connection, [run_id], verify_steps).get(run_id, ())
    return any(incident.has_its_turn(action) for incident in found)


def propose_after_switches(settings: Settings, connection: Connection, found: Mapping[int, Sequence[Incident]]) -> None:
    """Propose it, once, in the runs whose scores grow on when the switch of the heads that drifted is judged.

    found: the incidents of runs that the caller holds (`Store.lock_runs`).
    """
    for run_id, incident in ((run_id, one) for run_id, own in found.items() for one in own):
        known = incident.order is not None and action_of(incident.order.mode) == "qk_clip"
        turn = len(incident.causes) > 1 and incident.act == "propose" and incident.has_its_turn("qk_clip")
        if known or not turn or refusal(settings, connection, run_id, [], "qk_clip") is not None:
            continue
        run = connection.execute(select(runs.c.name).where(runs.c.id == run_id)).scalar_one()
        propose(connection, (run_id, run), "qk_clip_always", None, incident.sentence)
