"""Checks that nothing is lost between SGLang and a worker, with cumulative and with incremental chunks.

    python bench/engines/sglang_streams.py --model DIRECTORY --engine-args='…'

In each mode, many streams at once are compared with SGLang's own answers to the same prompts without streaming. One reader takes a chunk
and then nothing until all the others have ended. Then a few streams with logprobs, for which the same must hold. To be run where SGLang is
installed; each mode is a process of its own. `cpu` is that of the worker's process, SGLang's scheduler and detokenizer not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from penstock.backends.external.engine import EngineRequest
from penstock.backends.sglang.engine import SglangEngine
from penstock.config.engines import EngineSettings
from penstock.wire.messages import Sampling

MODES = {"cumulative": (), "incremental": ("--incremental-streaming-output",)}
GREEDY = Sampling(temperature=0)
MIN_ID, MAX_ID = 10, 1000
TOP = 3


def prompts(count: int) -> list[tuple[int, ...]]:
    random_ids = random.Random(count)
    return [tuple(random_ids.randrange(MIN_ID, MAX_ID) for _ in range(20 + number)) for number in range(count)]


def ask(prompt: tuple[int, ...], tokens: int, **more: Any) -> EngineRequest:
    return EngineRequest(secrets.token_hex(16), prompt, tokens, 1, ignore_eos=True, sampling=GREEDY, **more)


async def read(engine: SglangEngine, request: EngineRequest, until: asyncio.Event | None = None) -> tuple[list[int], int, int]:
    """The tokens, and the numbers of logprobs and chunks. A reader that stalls takes one chunk and waits for the event."""
    tokens: list[int] = []
    logprobs = chunks = 0
    async with contextlib.aclosing(engine.generate(request)) as stream:
        async for chunk in stream:
            tokens += chunk.token_ids
            logprobs += len(chunk.logprobs or ())
            chunks += 1
            if until is not None:
                await until.wait()
    return tokens, logprobs, chunks


async def whole(engine: SglangEngine, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """SGLang's own answer, without streaming."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = await engine._engine.async_generate(input_ids=list(prompt), sampling_params=sampling)
    return list(answer["output_ids"])


async def compare(engine: SglangEngine, streams: int, tokens: int) -> dict[str, Any]:
    asked = prompts(streams)
    expected = await asyncio.gather(*(whole(engine, prompt, tokens) for prompt in asked))
    others_ended = asyncio.Event()
    began, cpu = time.perf_counter(), time.process_time()
    stalled = asyncio.create_task(read(engine, ask(asked[0], tokens), others_ended))
    got = await asyncio.gather(*(read(engine, ask(prompt, tokens)) for prompt in asked[1:]))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    others_ended.set()
    all_of_them = [await stalled, *got]
    with_logprobs = await asyncio.gather(*(read(engine, ask(prompt, tokens, logprobs=TOP)) for prompt in asked[:8]))
    made = sum(len(answer) for answer, _, _ in got)
    return {
        "streams": streams,
        "lost": sum(max(0, tokens - len(answer)) for answer, _, _ in all_of_them),
        "repeated": sum(max(0, len(answer) - tokens) for answer, _, _ in all_of_them),
        "equal": sum(answer == right for (answer, _, _), right in zip(all_of_them, expected, strict=True)),
        "logprobs_right": all(
            answer == right and count == tokens for (answer, count, _), right in zip(with_logprobs, expected, strict=False)
        ),
        "stalled_chunks": all_of_them[0][2],
        "tokens_per_chunk": made / sum(chunks for _, _, chunks in got),
        "tokens_per_second": made / seconds,
        "cpu_us_per_token": cpu / made * 1e6,
    }


async def run(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    engine_args = (*shlex.split(arguments.engine_args), *MODES[mode])
    engine = SglangEngine(EngineSettings(model=str(arguments.model), engine_args=engine_args))
    await engine.start(lambda reason: sys.exit(f"SGLang has failed: {reason}"))
    try:
        # A warm-up: the cost of the first requests is not counted.
        await asyncio.gather(*(read(engine, ask(prompt, 8)) for prompt in prompts(8)))
        return await compare(engine, arguments.streams, arguments.tokens)
    finally:
        await engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine-args", default="")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--mode", choices=MODES, help="run one mode and print JSON (default: both, as a table)")
    arguments = parser.parse_args()
    if arguments.mode is not None:
        print(json.dumps(uvloop.run(run(arguments.mode, arguments))))
        return 0
    holds = True
    print("mode         streams  lost repeated  equal logprobs  tokens/s  µs cpu/token  tokens/chunk")
    for mode in MODES:
        answer = subprocess.run([sys.executable, *sys.argv, "--mode", mode], stdout=subprocess.PIPE, check=True, text=True)
        told = json.loads(answer.stdout.splitlines()[-1])
        is_right = (told["lost"], told["repeated"], told["equal"], told["logprobs_right"]) == (0, 0, told["streams"], True)
        holds &= is_right
        print(
            f"{mode:<12} {told['streams']:>7} {told['lost']:>5} {told['repeated']:>8} {told['equal']:>6} "
            f"{'right' if told['logprobs_right'] else 'WRONG':>8} {told['tokens_per_second']:>9.0f} {told['cpu_us_per_token']:>13.0f} "
            f"{told['tokens_per_chunk']:>13.2f}"
        )
    print("ok: nothing is lost or repeated, and all is as without streaming" if holds else "MISS")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
