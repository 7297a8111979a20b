"""The HTTP status of faults of workers and engines."""

from __future__ import annotations

import pytest

from penstock.api.errors import fault_status
from penstock.wire.messages import Fault


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("engine_refused", 400),
        ("invalid_token", 400),
        ("unsupported", 400),
        ("queue_full", 429),
        ("overloaded", 503),
        ("engine_failed", 503),
        ("engine_aborted", 503),
        ("engine_lost", 503),
        ("grammar_diverged", 500),
        ("stream_breach", 500),
    ],
)
def test_the_status_of_a_fault(code: str, status: int) -> None:
    assert fault_status(Fault(code, "why")) == status
