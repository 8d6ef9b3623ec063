"""Sessions are kept, so that they can end; what belongs to a boot is found without reading every row."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("token", sa.String(length=64), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("hash"),
    )
    op.create_index("ix_events_boot_id", "events", ["boot_id"])
    op.create_index("ix_warnings_boot_id", "warnings", ["boot_id"])


def downgrade() -> None:
    op.drop_index("ix_warnings_boot_id", "warnings")
    op.drop_index("ix_events_boot_id", "events")
    op.drop_table("sessions")
