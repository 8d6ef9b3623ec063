"""The gate of machines: whether they may order or propose a switch now, and the orders that it takes.

Webhooks, the verdict on a switch and switches that ranks pass on come here. People may always order.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from sqlalchemy import Connection, func, select

from foreshock.contract.modes import Mode, mode_name
from foreshock.contract.wire import HeadRef
from foreshock.server.commands.lifecycle import OPEN, Order, create
from foreshock.server.store.schema import commands as table

_COOLED: Final = ("alertmanager", "service")
_MOST_WAITING: Final = 64
"""Orders and proposals of machines that wait in one run: nobody reads more."""


def propose(
    connection: Connection, order: Order, wanted: Mapping[Mode, Sequence[HeadRef]], cooldown_seconds: float = 0.0
) -> str | None:
    """Create `order` for each mode with its heads, unless something is in the way: then nothing, and the reason.

    The caller holds the run. cooldown_seconds: how long after an order of the service or of a webhook none follows. An
    order that is carried out is not in the way: it has made the heads what they are, or was undone.
    """
    heads = [ref for own in wanted.values() for ref in own]
    if why := _in_the_way(connection, order.run_id, set(heads), cooldown_seconds):
        return why
    for mode, own in wanted.items():
        create(connection, replace(order, mode=mode_name(mode), heads=own))
    return None


def _in_the_way(connection: Connection, run_id: int, heads: set[HeadRef], cooldown: float) -> str | None:
    now, mine = time.time(), table.c.run_id == run_id
    # one that lies ahead by more than another replica's clock may was ordered by a clock that was wrong
    lately = table.c.created > now - cooldown, table.c.created <= now + cooldown
    ours = mine, table.c.source.in_(_COOLED), table.c.state != "rejected", *lately
    last = connection.execute(select(func.max(table.c.created)).where(*ours)).scalar()
    if cooldown and last is not None:
        return f"the run's cool-down lasts {cooldown - (now - last):.0f} s more"
    waiting = select(table.c.heads, table.c.state, table.c.source)
    rows = connection.execute(waiting.where(mine, table.c.state.in_((*OPEN, "proposed")), ~table.c.dry_run)).all()
    for row in rows:
        named = heads if row.heads is None else {(layer, head) for layer, head in row.heads}
        if row.state == "proposed" and heads <= named:
            return "a proposal for these heads waits for approval"
        if row.state != "proposed" and not named.isdisjoint(heads):
            return "a command for these heads is under way"
    machines = sum(row.source != "api" for row in rows)
    return f"{machines} orders of machines wait already" if machines >= _MOST_WAITING else None
