"""The first migration: the schema of the first release. Older stores cannot be read."""

revision = "0021"
down_revision = None


def upgrade() -> None:
    """Do nothing: `database._upgrade` creates the newest tables in an empty database directly."""
