"""Commands say which command they undo, and what became of the heads afterwards."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("commands") as table:
        table.add_column(sa.Column("undoes", sa.String(length=128), nullable=True))
        table.add_column(sa.Column("verification", sa.String(length=16), nullable=True))


def downgrade() -> None:
    # one by one: a batch makes the table anew on SQLite, and dropping the old one takes the ranks' answers along
    op.drop_column("commands", "verification")
    op.drop_column("commands", "undoes")
