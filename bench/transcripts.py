"""Measures the cost of tokenizing a turn of a long session, and compares it with a limit.

    python bench/transcripts.py

A conversation of 20 turns grows to 60,000 tokens of the default model: a long first message, as agents send it, then answers of about
1,500 tokens to messages of about 200. Each turn is encoded once with its session's transcript and once from scratch; both include the
chat template. The figures are CPU times of this process, medians of several repetitions with a new session each.

canonical   the answers' tokens are those that the tokenizer makes of their text
spelled     every answer is spelled letter by letter: its tokens are kept, although encoding from scratch gives others

New text costs about 1.5 µs per token, known text about 20 ns per token. `record`, after the answer, takes about 0.1 µs per token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.engine.checkpoints.checkpoint import find_default_model
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, Tokenizer
from penstock.text.transcript import Transcripts

TOKENS = 60_000
TURNS = 20
QUESTION_WORDS = 180
ANSWER_TOKENS = 1_500
LIMIT_MS = 3.0

Result = TypeVar("Result")


@dataclass
class Turn:
    tokens: int = 0
    new_tokens: int = 0
    same_text: bool = True
    same_tokens: bool = True
    known_ms: list[float] = field(default_factory=list)
    record_ms: list[float] = field(default_factory=list)
    scratch_ms: list[float] = field(default_factory=list)


def _from_scratch(tokenizer: Tokenizer, prompt: ChatPrompt) -> list[int]:
    return tokenizer.encode_part(tokenizer.render_chat(prompt))


def timed(into: list[float], work: Callable[..., Result], *arguments: object) -> Result:
    started = time.process_time()
    result = work(*arguments)
    into.append((time.process_time() - started) * 1000)
    return result


def prose(chooser: random.Random, words: Sequence[str], count: int) -> str:
    """Sentences of random words, with some numbers and line ends."""
    chosen = chooser.choices(words, k=count)
    for place in range(9, count, 10):
        chosen[place] += chooser.choice([".", ",", ";", "?", f" {chooser.randrange(1000)}.", ".\n\n", " (`x = 1`)"])
    return " ".join(chosen)


def canonical(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)[:ANSWER_TOKENS]


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    letters = {piece: index for index in tokenizer.ordinary_ids if len(piece := tokenizer.token_bytes(index)) == 1}
    return [letters[bytes([byte])] for byte in text.encode()][:ANSWER_TOKENS]


ANSWERS = {"canonical": canonical, "spelled": spelled}


async def converse(tokenizer: Tokenizer, answer: Callable[[Tokenizer, str], list[int]], turns: list[Turn]) -> None:
    """One conversation with its own transcripts."""
    chooser = random.Random(11)
    words = pack_tokenizer(None).load()
    vocabulary = [words.token_bytes(index).decode().strip() for index in words.ordinary_ids]
    first = TOKENS - TURNS * (QUESTION_WORDS + 40) - (TURNS - 1) * ANSWER_TOKENS
    messages = [ChatMessage(role="user", content=prose(chooser, vocabulary, int(first / 1.13)))]
    transcripts = Transcripts(1 << 30)
    for turn in turns:
        prompt = ChatPrompt(messages)
        started = time.process_time()
        known = await transcripts.encode_chat("session", "model", tokenizer, prompt)
        turn.known_ms.append((time.process_time() - started) * 1000)
        scratch = timed(turn.scratch_ms, _from_scratch, tokenizer, prompt)
        turn.tokens, turn.new_tokens = len(known.token_ids), len(known.token_ids) - known.reused_tokens
        turn.same_tokens = list(known.token_ids) == scratch
        turn.same_text = tokenizer.decode(known.token_ids) == tokenizer.decode(scratch)
        generated = answer(tokenizer, prose(chooser, vocabulary, ANSWER_TOKENS))
        timed(turn.record_ms, transcripts.record, known, [*generated, tokenizer.end_id])
        question = prose(chooser, vocabulary, QUESTION_WORDS)
        messages = [
            *messages,
            ChatMessage(role="assistant", content=tokenizer.decode(generated)),
            ChatMessage(role="user", content=question),
        ]


def report(name: str, turns: list[Turn]) -> bool:
    print(f"\n{name}\n turn  tokens    new  known, ms  scratch, ms  record, ms  same text  same tokens")
    for number, turn in enumerate(turns, 1):
        known, scratch, record = map(statistics.median, (turn.known_ms, turn.scratch_ms, turn.record_ms))
        print(
            f"{number:5} {turn.tokens:7,} {turn.new_tokens:6,} {known:10.2f} {scratch:12.2f} {record:11.2f}"
            f" {turn.same_text!s:>10} {turn.same_tokens!s:>12}"
        )
    took = statistics.median(turns[-1].known_ms)
    same = all(turn.same_text and (turn.same_tokens or name != "canonical") for turn in turns)
    holds = took < LIMIT_MS and same and turns[-1].tokens >= TOKENS
    print(f"turn {len(turns)} of {turns[-1].tokens:,} tokens: {took:.2f} ms, the limit is {LIMIT_MS} ms: {'ok' if holds else 'MISS'}")
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    repetitions = parser.parse_args().repetitions
    tokenizer = pack_tokenizer(find_default_model()).load()
    held = []
    for name, answer in ANSWERS.items():
        turns = [Turn() for _ in range(TURNS)]
        for _ in range(repetitions):
            asyncio.run(converse(tokenizer, answer, turns))
        held.append(report(name, turns))
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
