"""Tokens have no quota of the store any more, so nothing counts what each has stored."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("usage")


def downgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("run_id", sa.Integer(), sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("token", sa.String(64), primary_key=True, index=True),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
    )
