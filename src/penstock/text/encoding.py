"""Long texts are tokenized in threads beside the event loop, short ones at once.

The `tokenizers` library lets others run while it works, but what comes before and after it does not: rendering templates, making numbers
of ids. So the work is cut into steps, each of which takes some milliseconds at most, and waits for its turn again after several of them:
a prompt of a hundred thousand tokens does not keep another of a thousand waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.text.tokenizers.tokenizer import ChatPrompt, Tokenizer

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Work that can be left after every step; it returns its result."""

THREADS = 2

SHORT = 4096
"""Characters that are tokenized at once: about a millisecond. To do it in a thread takes a tenth of one longer."""

TURN_SECONDS = 0.02

# So long a thread rests after so much work, so that it does not keep the event loop from running by running Python itself.
WORK_SECONDS = 0.001
REST_SECONDS = 0.000_05

# What rendering takes, in characters that could be tokenized meanwhile.
MESSAGE_EFFORT = 40
CHARACTERS_RENDERED = 256
VALUE_EFFORT = 4


class Encoder:
    """Tokenizes for one event loop, in at most `threads` threads. They start when they are first needed.

    Where the caller is cancelled, its work ends with the turn that is under way.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")

    async def encode_text(self, tokenizer: Tokenizer, text: str) -> Sequence[int]:
        """What the tokenizer's `encode` returns."""
        if len(text) <= SHORT:
            return tokenizer.encode(text)
        return await self.run(_encode_text(tokenizer, text))

    async def encode_infill(self, tokenizer: Tokenizer, prefix: str, suffix: str) -> Sequence[int] | None:
        """What the tokenizer's `encode_infill` returns."""
        if len(prefix) + len(suffix) <= SHORT:
            return tokenizer.encode_infill(prefix, suffix)
        return await self._in_thread(tokenizer.encode_infill, prefix, suffix)

    async def render_chat(self, tokenizer: Tokenizer, prompt: ChatPrompt) -> str:
        """What the tokenizer's `render_chat` returns. Raises RequestError as it does."""
        if _effort(prompt) <= SHORT:
            return tokenizer.render_chat(prompt)
        return await self._in_thread(tokenizer.render_chat, prompt)

    async def run(self, steps: Steps[Result]) -> Result:
        """The result of this work, done in threads, whichever is free."""
        while True:
            ended: tuple[Result] | None = await self._in_thread(_take_turn, steps)
            if ended is not None:
                return ended[0]

    def close(self) -> None:
        """Does not wait: what is under way ends with its turn."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)


def at_once(steps: Steps[Result]) -> Result:
    """The result of work that is not worth a thread."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: Result = ended.value
            return result


def _take_turn(steps: Steps[Result]) -> tuple[Result] | None:
    """Some steps of the work; its result, once it has ended."""
    now = time.monotonic()
    deadline, rest = now + TURN_SECONDS, now + WORK_SECONDS
    while now < deadline:
        try:
            next(steps)
        except StopIteration as ended:
            return (ended.value,)
        now = time.monotonic()
        if now > rest:
            time.sleep(REST_SECONDS)
            rest = time.monotonic() + WORK_SECONDS
    return None


def _encode_text(tokenizer: Tokenizer, text: str) -> Steps[list[int]]:
    token_ids: list[int] = []
    for piece in tokenizer.encode_steps(text):
        token_ids += piece
        yield
    return token_ids


def _effort(prompt: ChatPrompt) -> int:
    """How long it takes to render, at least, in characters; no further than it matters."""
    effort = len(prompt.messages) * MESSAGE_EFFORT
    for message in prompt.messages:
        effort += (len(message["content"]) + len(message.get("reasoning_content", ""))) // CHARACTERS_RENDERED
        if calls := message.get("tool_calls"):
            effort += _effort_of(calls, SHORT)
    for values in (prompt.tools, prompt.documents, prompt.arguments):
        if values:
            effort += _effort_of(values, SHORT)
    return effort


def _effort_of(value: object, limit: int) -> int:
    """Of values that become JSON, until it exceeds the limit."""
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
