"""Process starts know in which sample each number was measured last, so that /metrics finds it at once."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("boots", sa.Column("measured", sa.Text()))


def downgrade() -> None:
    op.drop_column("boots", "measured")
