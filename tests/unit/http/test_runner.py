"""What a request costs its key, and that everything is given back, however it ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from front_end import FrontEnd, Produce, says
from penstock.http.gate import Gate
from penstock.http.keys import Keyring, KeySettings, given_keys
from penstock.http.quota import Quota, QuotaLimits
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import GenerationFault
from penstock.wire.messages import Delta, Fault, Submit

KEY = "psk-test"


def limited(produce: Produce, **limits: int) -> tuple[FrontEnd, Quota]:
    """A front end that knows one key, and what that may use."""
    front_end = FrontEnd(produce)
    keyring = Keyring(KeySettings(given=given_keys([KEY]), defaults=QuotaLimits(**limits)), front_end.tally)
    front_end.app = Gate(front_end.application, keyring, front_end.tally)
    tenant = keyring.tenant_of(KEY.encode())
    assert tenant is not None
    return front_end, tenant.quota


async def complete(front_end: FrontEnd, **fields: Any) -> None:
    body = json.dumps({"model": "m", "prompt": "hi", **fields}).encode()
    await front_end.send("POST", "/v1/completions", body, {"authorization": f"Bearer {KEY}"})


async def never_ends(_: Submit, mailbox: Mailbox) -> None:
    mailbox.put(Delta(0, tuple(b"abc")))
    await asyncio.Event().wait()


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "stream_options": {"resumable": True}}])
async def test_the_tokens_of_prompt_and_answer_are_booked(fields: dict[str, Any]) -> None:
    front_end, quota = limited(says("hel", "lo"), tokens_per_minute=1000)
    await complete(front_end, n=2, **fields)
    assert front_end.status == 200
    assert front_end.tally.key_tokens["api-key-1", "prompt"] == 2
    assert front_end.tally.key_tokens["api-key-1", "completion"] == 10
    remaining = dict(quota.headers())[b"x-ratelimit-remaining-tokens"]
    assert remaining == b"988"
    await front_end.detached.close()


async def test_tokens_that_came_before_the_client_left_are_booked() -> None:
    front_end, quota = limited(never_ends, tokens_per_minute=1000, concurrency=1)
    connection = asyncio.create_task(complete(front_end, stream=True))
    while len(front_end.sent) < 2:
        await asyncio.sleep(0)
    front_end.gone.set()
    await connection
    assert front_end.tally.key_tokens["api-key-1", "completion"] == 3
    assert quota.running == 0


async def test_every_generation_counts_against_the_concurrency() -> None:
    front_end, quota = limited(never_ends, concurrency=3)
    connection = asyncio.create_task(complete(front_end, stream=True, n=2))
    while quota.running < 2:
        await asyncio.sleep(0)
    sent = front_end.sent
    await complete(front_end, n=2)
    assert front_end.status == 429
    assert quota.running == 2
    front_end.sent = sent
    front_end.gone.set()
    await connection
    assert quota.running == 0


async def test_a_fault_gives_everything_back() -> None:
    async def produce(_: Submit, mailbox: Mailbox) -> None:
        raise GenerationFault(Fault("worker_lost", "gone"))

    front_end, quota = limited(produce, concurrency=1)
    for _ in range(2):
        await complete(front_end)
        assert front_end.status == 503
        assert quota.running == 0
        assert front_end.admission.idle.is_set()


async def test_a_session_s_turn_ends_with_its_request() -> None:
    front_end, _ = limited(says("x"))
    await complete(front_end, nvext={"session_control": {"session_id": "s", "action": "open"}})
    assert front_end.status == 200
    assert front_end.turn.session is not None
    assert front_end.turn.session.active == 0
    while len(asyncio.all_tasks()) > 1:
        # The session is bound to no worker, and is closed.
        await asyncio.sleep(0)
