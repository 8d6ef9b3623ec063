"""Gram matrices of heads whose inputs are spread over processes, until the parts of a sum are all there."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "grams",
        sa.Column("boot_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("layer", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("began_step", sa.BigInteger(), nullable=False),
        sa.Column("heads", sa.Text(), nullable=False),
        sa.Column("head_dim", sa.Integer(), nullable=False),
        sa.Column("first_input", sa.BigInteger(), nullable=False),
        sa.Column("end_input", sa.BigInteger(), nullable=False),
        sa.Column("all_inputs", sa.BigInteger(), nullable=False),
        sa.Column("received", sa.Double(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("triangles", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["boot_id"], ["boots.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("boot_id", "step", "layer"),
    )
    op.create_index("grams_by_step", "grams", ["run_id", "step"])


def downgrade() -> None:
    op.drop_table("grams")
