"""Runs count what outdates all their roll-ups, so that a build reads one number for it and not every process start."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("runs", sa.Column("reshaped", sa.BigInteger(), nullable=False, server_default="0"))
