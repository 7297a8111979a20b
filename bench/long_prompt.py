"""Measures how long the event loop stalls while a very long prompt is tokenized.

    python bench/long_prompt.py --tokenize-only

A text of 200,000 tokens of the default model is encoded as a completion's prompt, as a chat's, and as the next turn of that chat's session.
Meanwhile a task yields to the event loop again and again; its longest wait is the stall. Garbage collection is set as in the front end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

import uvloop

from penstock.engine.checkpoints.checkpoint import find_default_model
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, Tokenizer
from penstock.text.transcript import Transcripts
from transcripts import prose

TOKENS = 200_000
LIMIT_MS = 5.0
PAUSE_SECONDS = 0.000_5


class StallWatch:
    """Measures the longest time in seconds that a ready task waits for the event loop."""

    async def __aenter__(self) -> Self:
        self.worst = 0.0
        self._task = asyncio.create_task(self._watch())
        await asyncio.sleep(0.02)
        self.worst = 0.0
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + PAUSE_SECONDS
            await asyncio.sleep(PAUSE_SECONDS)
            self.worst = max(self.worst, time.perf_counter() - due)


async def measure(name: str, repetitions: int, work: Callable[[], Awaitable[Sequence[int]]], expected: Sequence[int]) -> bool:
    stalls, times = [], []
    same = True
    for _ in range(repetitions):
        async with StallWatch() as watch:
            started = time.perf_counter()
            token_ids = await work()
            times.append((time.perf_counter() - started) * 1000)
        stalls.append(watch.worst * 1000)
        same &= list(token_ids) == list(expected)
    typical = statistics.median(stalls)
    holds = same and typical < LIMIT_MS
    print(
        f"{name:12} {len(expected):8,} tokens {statistics.median(times):8.1f} ms   stall {typical:6.2f} ms (worst {max(stalls):6.2f})"
        f"   same tokens: {same}   {'ok' if holds else 'MISS'}"
    )
    return holds


async def tokenize(repetitions: int, tokens: int) -> bool:
    tokenizer = pack_tokenizer(find_default_model()).load()
    words = pack_tokenizer(None).load()
    vocabulary = [words.token_bytes(index).decode().strip() for index in words.ordinary_ids]
    text = prose(random.Random(11), vocabulary, int(tokens / 1.26))
    chat = [ChatMessage(role="user", content=text)]
    following = [*chat, ChatMessage(role="assistant", content="So it is."), ChatMessage(role="user", content="And then?")]
    transcripts = Transcripts(1 << 30)

    async def encode_chat(key: str | None, messages: list[ChatMessage]) -> Sequence[int]:
        return (await transcripts.encode_chat(key, "model", tokenizer, ChatPrompt(messages))).token_ids

    async def idle() -> Sequence[int]:
        await asyncio.sleep(0.5)
        return ()

    await encode_chat("session", chat)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    await measure("(nothing)", repetitions, idle, ())
    held = [
        await measure("completion", repetitions, lambda: transcripts.encoder.encode_text(tokenizer, text), tokenizer.encode(text)),
        await measure("chat", repetitions, lambda: encode_chat(None, chat), _from_scratch(tokenizer, chat)),
        await measure("next turn", repetitions, lambda: encode_chat("session", following), _from_scratch(tokenizer, following)),
    ]
    return all(held)


def _from_scratch(tokenizer: Tokenizer, messages: list[ChatMessage]) -> list[int]:
    return tokenizer.encode_part(tokenizer.render_chat(ChatPrompt(messages)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenize-only", action="store_true", help="measure the tokenizer alone, without a server")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    arguments = parser.parse_args()
    if not arguments.tokenize_only:
        parser.error("only --tokenize-only is there yet")
    sys.exit(0 if uvloop.run(tokenize(arguments.repetitions, arguments.tokens)) else 1)


if __name__ == "__main__":
    main()
