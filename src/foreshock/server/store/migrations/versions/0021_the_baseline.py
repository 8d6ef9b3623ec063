"""Where the migrations begin: the schema of the first release. No store before it is read."""

revision = "0021"
down_revision = None


def upgrade() -> None:
    """Nothing: an empty database is given the newest tables at once (`database._upgrade`)."""
