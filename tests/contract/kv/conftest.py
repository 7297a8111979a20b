"""Every test of the transport runs over shared memory and over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_workers import Workers


@pytest.fixture(params=["unix", "tcp"])
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workers]:
    started = Workers(tmp_path, request.param)
    yield started
    started.close()
