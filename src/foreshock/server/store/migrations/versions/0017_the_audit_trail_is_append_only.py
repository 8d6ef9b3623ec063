"""The database refuses to change the audit trail, whose rows are no longer chained by hashes."""

import sqlalchemy as sa
from alembic import op

from foreshock.server.store.schema import APPEND_ONLY

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.drop_column("audit", "previous_hash")
    op.drop_column("audit", "hash")
    for statement in APPEND_ONLY[op.get_bind().dialect.name]:
        op.execute(sa.text(statement))
