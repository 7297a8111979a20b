"""Looks into a database file from outside, as another program would."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def sql(path: Path, statement: str) -> list[tuple[Any, ...]]:
    """The rows of one statement."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement).fetchall()
