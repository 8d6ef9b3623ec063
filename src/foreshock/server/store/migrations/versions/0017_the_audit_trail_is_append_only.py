"""The database refuses to change the audit trail, whose rows are no longer chained by hashes."""

import sqlalchemy as sa
from alembic import op

from foreshock.server.store.schema import APPEND_ONLY

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_column("audit", "previous_hash")
    op.drop_column("audit", "hash")
    for statement in APPEND_ONLY[op.get_bind().dialect.name]:
        op.execute(sa.text(statement))


def downgrade() -> None:
    """The columns come back without the hashes, which are not known any more."""
    if op.get_bind().dialect.name == "sqlite":
        for statement in ("DROP TRIGGER audit_refuses_update", "DROP TRIGGER audit_refuses_delete"):
            op.execute(sa.text(statement))
    else:
        op.execute(sa.text("DROP FUNCTION audit_refuses_changes() CASCADE"))
    for name in ("previous_hash", "hash"):
        op.add_column("audit", sa.Column(name, sa.String(64), nullable=False, server_default=""))
