"""How often a machine may switch heads of one run. People may always."""

import time
from collections.abc import Sequence
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.modes import is_mode
from foreshock.server.commands.lifecycle import OPEN
from foreshock.server.settings import Settings
from foreshock.server.store.schema import commands

_MACHINES: Final = ("alertmanager", "grafana", "service")


async def refusal(
    settings: Settings, connection: AsyncConnection, run_id: int, heads: Sequence[tuple[int, int]], mode: str
) -> str | None:
    """Why a machine may not switch these heads now, or None."""
    if not is_mode(mode):
        return f"mode {mode} is not known to this service, which may be older than the agent"
    table = commands.c
    now = time.time()
    ours = (table.run_id == run_id, table.source.in_(_MACHINES), table.state != "rejected")
    recent = await connection.execute(
        select(func.count(), func.max(table.created)).where(*ours, table.created > now - 3600.0)
    )
    count, last = recent.one()
    if count >= settings.webhook_switches_per_hour:
        return f"the run has had {count} webhook switches within the hour"
    if last is not None and now - last < settings.webhook_cooldown_seconds:
        return f"the run's cool-down lasts {settings.webhook_cooldown_seconds - (now - last):.0f} s more"
    open_ = (*OPEN, "proposed", "applied")
    for row in await connection.execute(
        select(table.heads).where(table.run_id == run_id, table.mode == mode, table.state.in_(open_))
    ):
        if row.heads is None or {tuple(ref) for ref in heads} <= {tuple(ref) for ref in row.heads}:
            return "a command for this head and mode stands already"
    return None
