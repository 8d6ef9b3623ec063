"""Process starts know in which sample each number was measured last, so that /metrics finds it at once."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("boots", sa.Column("measured", sa.Text()))
