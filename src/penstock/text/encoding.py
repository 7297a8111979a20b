"""Tokenizes long texts in threads, short ones at once.

The `tokenizers` library releases the GIL, but the work around it does not: rendering templates, converting ids. So the work is cut into
steps of a few milliseconds, and after several steps it queues again: a prompt of 100,000 tokens does not keep one of 1,000 waiting. Tenants
take turns: one that sends a thousand long prompts does not keep the prompt of another waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.fairness import FairBudget, Share
from penstock.text.tokenizers.tokenizer import ChatPrompt, Tokenizer

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Work that can be paused after every step. It returns its result."""

THREADS = 2

SHORT = 4096
"""At most this many characters are tokenized at once: about 1 ms. A thread would add 0.1 ms."""

MAX_AT_ONCE_BYTES = 32 * 1024
"""What is read from a longer body is read in a thread. Reading this much takes up to 10 ms."""

TURN_SECONDS = 0.02

# A thread sleeps REST_SECONDS after WORK_SECONDS of work, so that the event loop gets the GIL. If the thread had to wait for a core or for
# the GIL, others need them more: then it sleeps PATIENCE times as long as it waited, at most MAX_REST_SECONDS.
WORK_SECONDS = 0.001
REST_SECONDS = 0.000_05
PATIENCE = 4
MAX_REST_SECONDS = 0.02

# The cost of rendering, and of each text, in characters that could be tokenized in that time.
TEXT_EFFORT = 40
MESSAGE_EFFORT = 40
CHARACTERS_RENDERED = 256
VALUE_EFFORT = 4


class Encoder:
    """Tokenizes for one event loop, in at most `threads` threads, which start on first use.

    When a caller is cancelled, its work ends after the current turn. `lane` is the tenant whose work it is.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self.turns = FairBudget(threads)
        """A turn in a thread takes 1."""

    async def encode_text(self, tokenizer: Tokenizer, text: str, lane: str = "") -> Sequence[int]:
        """What the tokenizer's `encode` returns."""
        return (await self.encode_texts(tokenizer, [text], lane))[0]

    async def encode_texts(
        self, tokenizer: Tokenizer, texts: Sequence[str], lane: str = "", most: int | None = None, in_all: int | None = None
    ) -> Sequence[Sequence[int]]:
        """What the tokenizer's `encode` returns for each text.

        A text with more than `most` tokens ends soon after that many. If there are more than `in_all`, the last texts are left out.
        """
        if sum(map(len, texts)) + (len(texts) - 1) * TEXT_EFFORT <= SHORT:
            return [tokenizer.encode(text) for text in texts]
        return await self.run(_encode_texts(tokenizer, texts, most, in_all), lane)

    async def encode_infill(self, tokenizer: Tokenizer, prefix: str, suffix: str, lane: str = "") -> Sequence[int] | None:
        """What the tokenizer's `encode_infill` returns."""
        if len(prefix) + len(suffix) <= SHORT:
            return tokenizer.encode_infill(prefix, suffix)
        return await self._in_thread(lane, tokenizer.encode_infill, prefix, suffix)

    async def render_chat(self, tokenizer: Tokenizer, prompt: ChatPrompt, lane: str = "") -> str:
        """What the tokenizer's `render_chat` returns. Raises RequestError as it does."""
        if _effort(prompt) <= SHORT:
            return tokenizer.render_chat(prompt)
        return await self._in_thread(lane, tokenizer.render_chat, prompt)

    async def read(self, lane: str, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """The result of this call, which reads a decoded body of `size` bytes: at once, or in a thread if the body is long."""
        if size <= MAX_AT_ONCE_BYTES:
            return work(*arguments)
        return await self._in_thread(lane, work, *arguments)

    async def run(self, steps: Steps[Result], lane: str = "") -> Result:
        """The result of this work, done turn by turn in any free thread."""
        while True:
            ended: tuple[Result] | None = await self._in_thread(lane, _take_turn, steps)
            if ended is not None:
                return ended[0]

    def close(self) -> None:
        """Does not wait. Running work ends after its current turn."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, lane: str, work: Callable[..., Result], *arguments: Any) -> Result:
        turn = Share(lane)
        try:
            if not self.turns.take(turn, 1):
                await self.turns.wait(turn, 1)
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        finally:
            self.turns.release(turn)


def at_once(steps: Steps[Result]) -> Result:
    """The result of work too short for a thread."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: Result = ended.value
            return result


def _take_turn(steps: Steps[Result]) -> tuple[Result] | None:
    """Runs steps for TURN_SECONDS. Returns the result once the work has ended."""
    began, used = time.monotonic(), time.thread_time()
    now, deadline = began, began + TURN_SECONDS
    while now < deadline:
        try:
            next(steps)
        except StopIteration as ended:
            return (ended.value,)
        now = time.monotonic()
        if now > began + WORK_SECONDS:
            time.sleep(rest_seconds(now - began, time.thread_time() - used))
            began, used = time.monotonic(), time.thread_time()
    return None


def rest_seconds(elapsed: float, used: float) -> float:
    """How long to rest after some work: longer if the thread waited for a core. A coarse clock may count more CPU time than passed."""
    return min(REST_SECONDS + PATIENCE * max(elapsed - used, 0.0), MAX_REST_SECONDS)


def _encode_texts(tokenizer: Tokenizer, texts: Sequence[str], most: int | None, in_all: int | None) -> Steps[list[list[int]]]:
    encoded: list[list[int]] = []
    total = 0
    for text in texts:
        token_ids: list[int] = []
        for piece in tokenizer.encode_steps(text):
            token_ids += piece
            yield
            if most is not None and len(token_ids) > most:
                break
        total += len(token_ids)
        if in_all is not None and total > in_all and encoded:
            break
        encoded.append(token_ids)
        yield
    return encoded


def _effort(prompt: ChatPrompt) -> int:
    """A lower bound for the cost of rendering, in characters. Stops counting above SHORT."""
    effort = len(prompt.messages) * MESSAGE_EFFORT
    if effort > SHORT:
        return effort
    for message in prompt.messages:
        effort += (len(message["content"]) + len(message.get("reasoning_content", ""))) // CHARACTERS_RENDERED
        if calls := message.get("tool_calls"):
            effort += _effort_of(calls, SHORT)
    for values in (prompt.tools, prompt.documents, prompt.arguments):
        if values:
            effort += _effort_of(values, SHORT)
    return effort


def _effort_of(value: object, limit: int) -> int:
    """The cost of values that become JSON. Stops counting above the limit."""
    effort = 0
    waiting: list[object] = [value]
    while waiting and effort <= limit:
        effort += VALUE_EFFORT
        match waiting.pop():
            case str(text):
                effort += len(text) // CHARACTERS_RENDERED
            case dict(members):
                waiting += members.values()
            case list(members) | tuple(members):
                waiting += members
    return effort
