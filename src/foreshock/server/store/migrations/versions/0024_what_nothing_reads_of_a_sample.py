"""Drop unused columns of samples; the bits of `nan_columns` shift, because one dropped column had a bit."""

from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.execute("UPDATE samples SET nan_columns = (nan_columns & 1) + (nan_columns >> 2) * 2 WHERE nan_columns > 1")
    with op.batch_alter_table("samples") as samples:
        for column in ("unix_seconds", "loss_max", "loss_nonfinite_steps", "grad_norm_nonfinite_steps"):
            samples.drop_column(column)
