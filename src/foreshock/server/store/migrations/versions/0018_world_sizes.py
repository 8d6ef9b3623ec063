"""Process starts hold their world size, which tells generations of a run apart."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("boots", sa.Column("world_size", sa.Integer()))
    op.create_index("boots_by_world_size", "boots", ["run_id", "world_size"])
    op.create_index("boots_by_until_step", "boots", ["run_id", "until_step"])
    boots = sa.table("boots", *map(sa.column, ("id", "rank", "description", "world_size")))
    described = sa.select(boots).where(boots.c.description.is_not(None))
    for row in op.get_bind().execute(described).all():
        world_size = json.loads(row.description).get("world_size", 1)
        if world_size > row.rank:
            op.execute(boots.update().where(boots.c.id == row.id).values(world_size=world_size))
