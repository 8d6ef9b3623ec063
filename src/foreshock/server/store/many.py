"""Statements that are executed for many rows: compiled once for each kind of database, and given plain values.

Where every batch brings rows, the query layer spends more time on their parameters than the database on the rows.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Dialect
from sqlalchemy.sql.dml import UpdateBase

Values = Mapping[str, Any]


class Many:
    """A statement with these parameters, two or more; values are of types that the database's driver takes as they are:
    numbers, truth values, text, bytes."""

    def __init__(self, statement: UpdateBase, parameters: Iterable[str]) -> None:
        self._statement, self._parameters = statement, list(parameters)
        self._compiled: dict[str, tuple[str, Callable[[Values], Any]]] = {}

    def execute(self, connection: Connection, rows: Iterable[Values]) -> None:
        """Execute it for each of these rows, one at least; every parameter is among a row's values."""
        dialect = connection.dialect
        if dialect.name not in self._compiled:
            self._compiled[dialect.name] = self._compile(dialect)
        words, given = self._compiled[dialect.name]
        connection.exec_driver_sql(words, [given(row) for row in rows])

    def _compile(self, dialect: Dialect) -> tuple[str, Callable[[Values], Any]]:
        compiled: Any = self._statement.compile(dialect=dialect, column_keys=self._parameters)
        return str(compiled), itemgetter(*compiled.positiontup) if dialect.positional else dict
