"""Tokens have no quota of the store any more, so nothing counts what each has stored."""

from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.drop_table("usage")
