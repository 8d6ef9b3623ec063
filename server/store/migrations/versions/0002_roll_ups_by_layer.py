"""Roll-ups lie by layer, so that one head's curve does not read every head of the model."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Roll-ups are a memory of the samples: they are dropped, and built again where they are missed."""
    op.drop_table("rollups")
    op.execute("DELETE FROM rollup_spans")
    op.create_table(
        "rollups",
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("metric", sa.String(length=64), nullable=False),
        sa.Column("layer", sa.Integer(), nullable=False),
        sa.Column("span", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "width", "metric", "layer", "span"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("rollups")
    op.execute("DELETE FROM rollup_spans")
    op.create_table(
        "rollups",
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("metric", sa.String(length=64), nullable=False),
        sa.Column("bucket", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "width", "metric", "bucket"),
    )
