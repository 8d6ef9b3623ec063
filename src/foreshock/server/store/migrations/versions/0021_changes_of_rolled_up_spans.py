"""Spans count their changes, so that what is to be rolled up is known after a restart and without a run's number."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    for name in ("changed", "built"):
        op.add_column("rollup_spans", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(
        "INSERT INTO rollup_spans (run_id, span, changed) SELECT DISTINCT run_id, step / 1024, 1 FROM samples "
        "WHERE true ON CONFLICT DO NOTHING"
    )
    due = sa.text("changed != built")
    op.create_index("rollup_spans_due", "rollup_spans", ["run_id", "span"], sqlite_where=due, postgresql_where=due)
    op.drop_column("runs", "reshaped")
