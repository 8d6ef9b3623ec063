"""Boots know when their newest step came, so that a hung training is told from one that nothing is heard of."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("boots", sa.Column("newest_step", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("boots", sa.Column("stepped", sa.Double()))


def downgrade() -> None:
    op.drop_column("boots", "stepped")
    op.drop_column("boots", "newest_step")
