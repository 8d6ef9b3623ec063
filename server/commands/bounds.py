"""How often a machine may switch heads of one run. People may always."""

import time
from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, func, select

from foreshock.server.commands.lifecycle import OPEN
from foreshock.server.settings import Settings
from foreshock.server.store.schema import commands

_MACHINES: Final = ("alertmanager", "service")


def refusal(
    settings: Settings,
    connection: Connection,
    run_id: int,
    heads: Sequence[tuple[int, int]],
) -> str | None:
    """Why a machine may not switch these heads now, or None. An order that is carried out is no reason: it has made
    the heads what they are, or was undone."""
    table = commands.c
    now, cooldown = time.time(), settings.webhook_cooldown_seconds
    ours = (table.run_id == run_id, table.source.in_(_MACHINES), table.state != "rejected")
    # one that lies ahead by more than another replica's clock may was ordered by a clock that was wrong
    lately = table.created > now - cooldown, table.created <= now + cooldown
    recent = connection.execute(select(func.max(table.created)).where(*ours, *lately))
    if (last := recent.scalar()) is not None:
        return f"the run's cool-down lasts {cooldown - (now - last):.0f} s more"
    under_way = table.run_id == run_id, table.state.in_((*OPEN, "proposed")), ~table.dry_run
    for row in connection.execute(select(table.heads, table.state).where(*under_way)):
        named = set(heads) if row.heads is None else {(layer, head) for layer, head in row.heads}
        if set(heads) <= named or (row.state != "proposed" and not named.isdisjoint(heads)):
            return "a command for these heads is under way"
    return None
