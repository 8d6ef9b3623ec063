"""GET /v1/usage: what tokens have used of what all share, for whoever holds them and for those who run the service."""

from fastapi import APIRouter, Request
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.server.access.auth import ANYONE, Keyring, caller_of
from foreshock.server.models import QuotaOfToken, TokenUsage, UsageList
from foreshock.server.settings import NO_QUOTA
from foreshock.server.store.schema import usage

router = APIRouter()


@router.get("/v1/usage")
async def get_usage(request: Request) -> UsageList:
    """Runs and bytes in the store of each token, beside its quota.

    Any token is told what it used itself, one that reads every run what all used. Without tokens nothing is counted.
    """
    caller = caller_of(request)
    keyring: Keyring = request.app.state.keyring
    quotas = {token.name: token.quota for token in keyring.tokens}
    of_all = caller is ANYONE or (caller.may("read") and not caller.run_prefix)

    async def read(connection: AsyncConnection) -> dict[str, tuple[int, int]]:
        query = select(usage.c.token, func.count(), func.sum(usage.c.stored_bytes)).group_by(usage.c.token)
        rows = await connection.execute(query if of_all else query.where(usage.c.token == caller.name))
        return {token: (number, int(size)) for token, number, size in rows}

    used = await request.app.state.store.read_in_thread(read)
    names = sorted(quotas.keys() | used.keys()) if of_all else [caller.name]
    return UsageList(
        tokens=[
            TokenUsage(
                token=name,
                runs=used.get(name, (0, 0))[0],
                stored_bytes=used.get(name, (0, 0))[1],
                quota=QuotaOfToken(**quotas.get(name, NO_QUOTA).model_dump()),
            )
            for name in names
        ]
    )
