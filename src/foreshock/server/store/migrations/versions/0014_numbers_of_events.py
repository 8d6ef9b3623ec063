"""Every run counts its own events, so that their numbers say nothing of what other runs do."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

_NUMBER = """
UPDATE events SET number = counted.number
FROM (SELECT id, row_number() OVER (PARTITION BY run_id ORDER BY id) AS number FROM events) AS counted
WHERE counted.id = events.id
"""


def upgrade() -> None:
    op.add_column("events", sa.Column("number", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(_NUMBER)
    op.drop_index("events_of_run", "events")
    op.create_index("events_of_run", "events", ["run_id", "number"], unique=True)
