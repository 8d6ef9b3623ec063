"""Runs carry what people say of them: a display name, tags and notes."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("display_name", sa.String(length=128), nullable=True))
    op.add_column("runs", sa.Column("tags", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("notes", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "notes")
    op.drop_column("runs", "tags")
    op.drop_column("runs", "display_name")
