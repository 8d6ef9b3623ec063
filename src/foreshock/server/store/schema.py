"""The database tables. Every row is either received data, or can be computed again from received data."""

from typing import Final

from sqlalchemy import (
    DDL,
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    event,
    false,
)

metadata: Final = MetaData()
_Id = BigInteger().with_variant(Integer, "sqlite")  # SQLite assigns ids automatically only in an INTEGER key

runs: Final = Table(
    "runs",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("first_seen", Double, nullable=False),
    Column("last_seen", Double, nullable=False, index=True),
    Column("changes", BigInteger, nullable=False, server_default="0"),  # counter of changes; starts at its first µs
    Column("display_name", String(128)),  # shown to people; everything else uses `name`
    Column("tags", Text),  # JSON list
    Column("notes", Text),
)

topologies: Final = Table(
    "topologies",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("layers", Text, nullable=False),  # JSON list of contract.wire.Layer
)

boots: Final = Table(
    "boots",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("rank", Integer, nullable=False),
    Column("boot", String(128), nullable=False),
    Column("started_step", BigInteger),
    Column("earliest_step", BigInteger),  # smallest since_step of its samples
    Column("until_step", BigInteger),  # samples after it are superseded: a later boot began there
    Column("world_size", Integer),  # at its start; NULL if unknown, or not larger than its rank
    Column("topology", ForeignKey("topologies.hash")),
    Column("description", Text),  # JSON of Started without its layers
    Column("finished_status", String(16)),
    Column("health", Text),  # JSON of the AgentHealth with the highest sequence, if something failed
    Column("health_sequence", BigInteger, nullable=False, default=0),
    Column("nonfinite_steps", BigInteger, nullable=False, default=0),
    Column("last_sequence", BigInteger, nullable=False, default=0),
    Column("last_seen", Double, nullable=False),  # time of its last batch that was not replayed
    Column("began", Double),  # by the service's clock; NULL if its agent sent no age
    Column("place", LargeBinary, nullable=False, server_default=""),  # process_starts.place_of
    Column("newest", Boolean, nullable=False, server_default=false()),  # of its rank in the newest generation
    Column("beside", Boolean, nullable=False, server_default=false()),  # it sent a batch while not the newest
    Column("replayed", Boolean, nullable=False, server_default=false()),  # all its batches were replayed from a spool
    Column("newest_step", BigInteger, nullable=False, server_default="0"),  # of its samples and heartbeats
    Column("stepped", Double),  # time at which newest_step arrived, by the service's clock
    Column("measured", Text),  # newest.with_sample
    UniqueConstraint("run_id", "rank", "boot"),
    Index("boots_by_place", "run_id", "rank", "place"),
    Index("newest_boots", "run_id", "newest", "place"),
    Index("boots_beside", "run_id", "beside"),
    Index("boots_by_name", "run_id", "boot"),
    Index("boots_by_topology", "run_id", "topology"),
    Index("boots_by_world_size", "run_id", "world_size"),
    Index("boots_by_until_step", "run_id", "until_step"),
)

batches: Final = Table(
    "batches",
    metadata,
    Column("boot_id", ForeignKey("boots.id", ondelete="CASCADE"), primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    sqlite_with_rowid=False,
)

samples: Final = Table(
    "samples",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("boot_id", ForeignKey("boots.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("sequence", BigInteger, nullable=False),
    Column("position", Integer, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("since_step", BigInteger, nullable=False),
    Column("loss", Double),
    Column("grad_norm", Double),
    Column("learning_rate", Double),
    Column("step_seconds", Double),
    Column("agent_seconds", Double),
    Column("nan_columns", Integer, nullable=False),  # bit i: SCALARS[i] is NaN, which SQLite stores as NULL
    Column("arrays", LargeBinary),  # readings.pack_sample
    Index("samples_by_step", "run_id", "step"),
)

events: Final = Table(
    "events",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("number", BigInteger, nullable=False, server_default="0"),  # counts its run's events; shown to tenants
    Column("boot_id", ForeignKey("boots.id", ondelete="CASCADE"), index=True),
    Column("rank", Integer),
    Column("kind", String(16), nullable=False),
    Column("step", BigInteger),
    Column("unix_seconds", Double, nullable=False),
    Column("sentence", Text, nullable=False),
    Column("mode", String(64)),
    Column("outcome", String(16)),
    Column("payload", Text),  # JSON of the Verdict, Switched or Order
    Index("events_of_run", "run_id", "number", unique=True),
    Index("events_by_kind", "run_id", "kind", "outcome", "id"),
    sqlite_autoincrement=True,  # ids are never reused, so the service can read all events after an id
)

warnings: Final = Table(
    "warnings",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("uid", String(128), primary_key=True),
    Column("boot_id", ForeignKey("boots.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("boot", String(128), nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("position", Integer, nullable=False),
    Column("raised_step", BigInteger, nullable=False),
    Column("cause", String(16), nullable=False),
    Column("active", Boolean, nullable=False),
    Column("verdict", Text, nullable=False),  # JSON of the newest Verdict with this id
    Column("rejected", Boolean, nullable=False, server_default=false()),  # a person rejected a switch for it
)

commands: Final = Table(
    "commands",
    metadata,
    Column("number", _Id, primary_key=True),
    Column("id", String(128), nullable=False, unique=True),
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("state", String(16), nullable=False),
    Column("source", String(16), nullable=False),
    Column("issued_by", String(128), nullable=False),
    Column("reason", Text, nullable=False),
    Column("action", String(32), nullable=False, server_default="switch"),  # a key of contract.orders.KINDS
    Column("heads", JSON(none_as_null=True)),
    Column("mode", String(64), nullable=False),  # the mode of a switch, or the action of another kind
    Column("expect", String(64)),
    Column("dry_run", Boolean, nullable=False),
    Column("created", Double, nullable=False),
    Column("expires", Double),
    Column("expires_step", BigInteger),
    Column("idempotency_key", String(256)),
    Column("request_hash", String(64)),
    Column("undoes", String(128)),  # id of the command whose switch this one undoes
    Column("verification", String(16)),  # orders.Verification, after enough steps
    Column("decided_by", String(160)),  # who approved or rejected it
    Column("decided", Double),
    UniqueConstraint("run_id", "idempotency_key"),
    Index("commands_open", "run_id", "state"),
)

command_ranks: Final = Table(
    "command_ranks",
    metadata,
    Column("command_id", ForeignKey("commands.id", ondelete="CASCADE"), primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("deliveries", Integer, nullable=False, default=0),
    Column("outcome", String(16)),
    Column("switched", Text),  # JSON of the Switched, the rank's answer
    Column("boot", String(128)),  # of the process start that answered
)

audit: Final = Table(
    "audit",
    metadata,
    Column("sequence", _Id, primary_key=True, autoincrement=False),
    Column("unix_seconds", Double, nullable=False),
    Column("actor", String(160), nullable=False),
    Column("action", String(64), nullable=False),
    Column("run", String(128)),
    Column("command", String(128)),
    Column("details", Text, nullable=False),  # JSON
)
APPEND_ONLY: Final = {
    "sqlite": [
        f"""CREATE TRIGGER audit_refuses_{change} BEFORE {change.upper()} ON audit
        BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END"""
        for change in ("update", "delete")
    ],
    "postgresql": [
        """CREATE OR REPLACE FUNCTION audit_refuses_changes() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'the audit trail is append-only'; END $$""",
        """CREATE TRIGGER audit_refuses_changes BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
        EXECUTE FUNCTION audit_refuses_changes()""",
    ],
}
"""Statements, by dialect, that make the database reject updates and deletions in the audit trail."""
for _dialect, _statements in APPEND_ONLY.items():
    for _statement in _statements:
        _trigger = DDL(_statement)  # type: ignore[no-untyped-call]
        event.listen(audit, "after_create", _trigger.execute_if(dialect=_dialect))

webhook_alerts: Final = Table(
    "webhook_alerts",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("unix_seconds", Double, nullable=False, index=True),
)

sessions: Final = Table(
    "sessions",
    metadata,
    Column("hash", String(64), primary_key=True),  # SHA-256 of the cookie; the cookie itself is not stored
    Column("token", String(64), nullable=False),  # Token.sha256 of the token used to log in
    Column("until", Double, nullable=False),
)

service_state: Final = Table(
    "service_state",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Double, nullable=False),
)

rollups: Final = Table(
    "rollups",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("metric", String(64), primary_key=True),
    Column("layer", Integer, primary_key=True),  # readings.WHOLE for the run or the worst heads
    Column("span", BigInteger, primary_key=True),
    Column("data", LargeBinary, nullable=False),  # readings._buckets_of
)

rollup_spans: Final = Table(
    "rollup_spans",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("span", BigInteger, primary_key=True),
    Column("changed", BigInteger, nullable=False, server_default="0"),  # counts changes to its samples
    Column("built", BigInteger, nullable=False, server_default="0"),  # value of `changed` at the last roll-up
)
Index(
    "rollup_spans_due",
    rollup_spans.c.run_id,
    rollup_spans.c.span,
    sqlite_where=rollup_spans.c.changed != rollup_spans.c.built,
    postgresql_where=rollup_spans.c.changed != rollup_spans.c.built,
)
