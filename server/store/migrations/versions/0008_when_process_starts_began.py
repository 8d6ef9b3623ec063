"""Process starts say when they began, by the service's clock, and whether only a successor has spoken for them."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("boots", sa.Column("began", sa.Double(), nullable=True))
    op.add_column("boots", sa.Column("replayed", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("boots", "replayed")
    op.drop_column("boots", "began")
