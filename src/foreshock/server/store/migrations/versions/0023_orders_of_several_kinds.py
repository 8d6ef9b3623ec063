"""Store the kind of each order; all existing orders are switches."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.add_column("commands", sa.Column("action", sa.String(32), nullable=False, server_default="switch"))
