"""The pool over real sockets: a worker whose model cannot be prepared is reported, tried again, and used as soon as it can be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.cluster.pool import WorkerPool, next_look
from penstock.text.tokenizers.cache import Fetch
from penstock.wire.messages import ModelInfo
from workers import SECRET, Worker, until


@pytest.mark.parametrize("error", [KeyError("model"), RuntimeError("expected value at line 1"), OSError(5, "Input/output error")])
async def test_a_model_that_cannot_be_prepared_is_reported_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    attempts: list[str] = []
    is_whole = asyncio.Event()

    async def prepare(model: ModelInfo, _: Fetch) -> None:
        attempts.append(model.name)
        if not is_whole.is_set():
            raise error

    async with Worker(tmp_path, "a") as worker, WorkerPool([worker.address], "test", SECRET, prepare) as pool:
        await until(lambda: len(attempts) > 2)
        assert pool.members == []
        assert caplog.text.count("a cannot be used") == 1
        assert type(error).__name__ in caplog.text
        is_whole.set()
        await until(lambda: [member.name for member in pool.members] == ["a"])


@pytest.mark.parametrize("delay", [0.9, 2.9])
def test_looks_are_not_late_because_the_one_before_was(delay: float) -> None:
    """A front end that is busy notices a silent worker as soon as an idle one. One that has slept does not make up for its looks."""
    due = now = 0.0
    for _ in range(16):
        due = next_look(due, 1.0, now)
        now = max(now, due + delay)
    assert due == 16
    assert next_look(due, 1.0, 100.0) == 101
