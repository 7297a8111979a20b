"""Streaming sessions of the real SGLang, which holds their KV and is sent only what is new: `--engine sglang`, where it is installed.

A session must change nothing but what is computed: the judge is transformers, with all of the prompt. Chunks are incremental here; they are
cumulative in `backends`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from chat_model import greedy, random_prompt, winners
from contract.backends.rig import GREEDY, Rig
from contract.backends.setups import SETUPS
from penstock.backends.external.engine import EngineRequest
from penstock.backends.sglang.engine import SglangEngine

SETUP = SETUPS["sglang"]
SESSION = "5" * 32

pytestmark = [pytest.mark.timeout(SETUP.start_seconds + 3 * SETUP.patience), pytest.mark.filterwarnings("ignore:::(?!penstock)")]


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if "sglang" not in (request.config.getoption("engine") or ()):
        pytest.skip("the real SGLang: --engine sglang, where it is installed")
    words = SETUP.flags[SETUP.flags.index("--engine-args") + 1]
    with Rig(SETUP, "--streaming-sessions", "--engine-args", f"{words} --incremental-streaming-output") as rig:
        yield rig


class Agent:
    """One session, and what was said in it."""

    def __init__(self, rig: Rig) -> None:
        engine = rig.backend._engine  # type: ignore[attr-defined]
        assert isinstance(engine, SglangEngine)
        self.engine = engine
        self.rig = rig
        self.said: tuple[int, ...] = ()

    def request(self, name: str, **fields: Any) -> EngineRequest:
        """All that was said, and 20 tokens more."""
        self.said += tuple(random_prompt(name, 20))
        given = {"max_tokens": 12, "seed": 1, "ignore_eos": True, "sampling": GREEDY, "session_id": SESSION, **fields}
        return EngineRequest(secrets.token_hex(16), self.said, **given)

    async def turn(self, name: str, **fields: Any) -> int:
        """Returns how many tokens the engine had of it."""
        request = self.request(name, **fields)
        chunks = [chunk async for chunk in self.engine.generate(request)]
        made = tuple(token for chunk in chunks for token in chunk.token_ids)
        assert list(made) == winners(self.rig.directory, self.said, made)
        self.said += made
        return chunks[0].cached_tokens or 0

    async def close(self) -> None:
        await self.engine.close_session(SESSION)


@pytest.fixture
def agent(rig: Rig) -> Iterator[Agent]:
    agent = Agent(rig)
    yield agent
    rig.run(agent.close())
    rig.check_settled()


def test_a_turn_has_all_but_the_last_token_of_those_before(rig: Rig, agent: Agent) -> None:
    """What is cached otherwise are whole blocks."""

    async def talk() -> None:
        assert await agent.turn("first") == 0
        for name in ("second", "third"):
            had = len(agent.said)
            assert await agent.turn(name) == had - 1
        await agent.close()
        assert await agent.turn("reopened") % rig.model.block_size == 0

    rig.run(talk())


def test_a_turn_that_ends_at_a_token_the_engine_ignores(rig: Rig, agent: Agent) -> None:
    async def talk() -> None:
        await agent.turn("before the cut")
        had = len(agent.said)
        stop = greedy(rig.directory, (*agent.said, *random_prompt("cut", 20)), 4)[-1]
        await agent.turn("cut", stop_ids=(stop,))
        assert len(agent.said) < had + 20 + 12
        await agent.turn("behind the cut")
        await agent.turn("long behind the cut")

    rig.run(talk())


def test_a_turn_whose_end_nobody_read(rig: Rig, agent: Agent) -> None:
    """Cancelled when the engine has already ended it, and keeps it."""

    async def talk() -> None:
        await agent.turn("before the unread")
        request = agent.request("unread")
        async with contextlib.aclosing(agent.engine.generate(request)) as chunks:
            await anext(chunks)
            await rig.until(lambda: request.id not in agent.engine._manager.rid_to_state)
        await agent.turn("behind the unread")
        await agent.turn("long behind the unread")

    rig.run(talk())


def test_a_turn_that_is_aborted(rig: Rig, agent: Agent) -> None:
    async def talk() -> None:
        await agent.turn("before the abort")
        async with contextlib.aclosing(agent.engine.generate(agent.request("aborted", max_tokens=1500))) as chunks:
            await anext(chunks)
        await agent.turn("behind the abort")
        had = len(agent.said)
        assert await agent.turn("long behind the abort") == had - 1

    rig.run(talk())


def test_a_first_turn_that_leaves_while_its_session_is_opened(rig: Rig, agent: Agent) -> None:
    async def talk() -> None:
        opening = asyncio.ensure_future(anext(agent.engine.generate(agent.request("left"))))
        # At every turn of the loop: the answer takes several.
        while not agent.engine._manager.session_futures:
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        # By then the engine has opened it, and nobody has heard of that.
        await agent.engine.ping()
        await agent.turn("stayed")
        had = len(agent.said)
        assert await agent.turn("stayed on") == had - 1

    rig.run(talk())


def test_a_second_turn_beside_the_first(rig: Rig, agent: Agent) -> None:
    async def talk() -> None:
        await agent.turn("alone")
        other = Agent(rig)
        other.said = agent.said
        had = len(agent.said)
        cached = await asyncio.gather(agent.turn("one of two"), other.turn("the other of two"))
        assert cached[0] == had - 1

    rig.run(talk())
