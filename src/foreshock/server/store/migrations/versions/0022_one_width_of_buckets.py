"""Give roll-ups buckets of one width and a row for the worst heads of all layers; all are built again."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.drop_table("rollups")
    op.create_table(  # with row ids, because rows are too large for a table WITHOUT ROWID
        "rollups",
        sa.Column("run_id", number, sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("metric", sa.String(64), primary_key=True),
        sa.Column("layer", sa.Integer(), primary_key=True),
        sa.Column("span", sa.BigInteger(), primary_key=True),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )
    op.execute("UPDATE rollup_spans SET changed = changed + 1")
