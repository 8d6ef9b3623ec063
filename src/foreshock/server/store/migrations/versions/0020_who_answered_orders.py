"""Answers of orders name the process start that gave them: what it did after the step of a resume is done again."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.add_column("command_ranks", sa.Column("boot", sa.String(128)))
