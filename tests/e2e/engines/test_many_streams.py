"""Many streams at once, one of whose readers stalls: nothing is lost, nothing repeated."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI

from e2e.engines.asking import begin_stalled, check_stalled, is_idle
from e2e.engines.expected import Expected, Judge, sure_answers
from e2e.engines.setups import MODEL
from e2e.harness import Server, wait_until

STREAMS = 64
TOKENS = 200
QUESTION = "What do you see from the top of the hill?"


async def test_sixty_four_streams_and_a_reader_that_stalls(server: Server, judge: Judge) -> None:
    """The stalled one asks for more than its socket holds, reads nothing until all others have ended, and then reads everything.
    What it does not take has to wait, and merge, in the server."""
    expected, long = sure_answers(judge, 2000, STREAMS, TOKENS), judge.chat(QUESTION, TOKENS)
    with begin_stalled(server, QUESTION, TOKENS) as stalled:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            answers = await asyncio.gather(*[read(client, one) for one in expected])
        assert answers == [(one.text, list(one.token_ids), one.finish_reason) for one in expected]
        wait_until(lambda: has_made_everything(server))
        assert max(check_stalled(stalled, long)) > 20, "it never waited"
    wait_until(lambda: is_idle(server))


async def read(client: AsyncOpenAI, one: Expected) -> tuple[str, list[int], str | None]:
    stream = await client.completions.create(
        model=MODEL,
        prompt=list(one.prompt_ids),
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    text = ""
    token_ids: list[int] = []
    reason: str | None = None
    async for chunk in stream:
        choice: Any = chunk.choices[0]
        text += choice.text
        token_ids += (choice.model_extra or {})["token_ids"]
        reason = choice.finish_reason or reason
    return text, token_ids, reason


def has_made_everything(server: Server) -> bool:
    """The worker has made everything, whoever has taken it."""
    return all(server.metric(f"penstock_requests_{state}", role="worker", name="worker-0") == 0 for state in ("running", "queued"))
