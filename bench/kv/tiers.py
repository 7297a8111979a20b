"""Measures the tiers of KV: agents whose conversations need four times the memory that the device has.

    python bench/kv/tiers.py reuse      an unlimited device, a small one, and a small one with host memory
    python bench/kv/tiers.py restart    a small device with host memory and a disk; the server is killed between two turns
    python bench/kv/tiers.py slow       host memory that is slower than computing
    python bench/kv/tiers.py embedded   as `reuse`, with the embedded engine on the CPU: --model DIRECTORY

Real processes, on loopback. Agents take turns; each has a session. Exits with 1 when a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp

from servers import Process, serving
from sessions import ask, words

BLOCK, TEMPLATE = 16, 16
# An 8B model in bfloat16 on an H200: prompts at 20,000 tokens a second, 128 KiB of KV per token, a bus of 50 GB/s, a disk of 5 GB/s.
RATES = ["--prefill-rate=20000", "--prefill-budget=2048", "--step-ms=10", "--kv-host-gbps=400", "--kv-disk-gbps=40"]
BLOCK_BYTES = 2 * 2**20
# One token each for most tokenizers.
COMMON = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "that",
    "it",
    "with",
    "as",
    "his",
    "on",
    "be",
    "at",
    "by",
    "had",
    "not",
    "are",
)
MIN_REUSE, MIN_SPEEDUP, MIN_KEPT = 0.95, 3.0, 0.90
MIN_HITS = 0.5
"""Below this there is nothing to compare with."""


@dataclass
class Agent:
    number: int
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: int = 0


@dataclass
class Turns:
    """What the turns after the first of each agent have seen."""

    waits: list[float] = field(default_factory=list)
    cached: int = 0
    known: int = 0

    @property
    def reuse(self) -> float:
        """Of the tokens of the turn before."""
        return self.cached / self.known

    @property
    def p50(self) -> float:
        return statistics.median(self.waits)


@dataclass
class Work:
    """Agents with a first prompt, who get an answer and a tool's result each turn."""

    agents: int
    prompt: int
    tool: int = 200
    answer: int = 40
    turns: int = 4
    at_once: int = 2
    model: str = "simulator"

    @property
    def blocks(self) -> int:
        """What all conversations need at their end, with a few tokens per message for the chat template."""
        return self.agents * (self.prompt + self.turns * (self.tool + self.answer + TEMPLATE)) // BLOCK


def common_words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(COMMON, k=count))


async def take_turns(server: Process, work: Work, agents: Sequence[Agent], rounds: range) -> Turns:
    seen = Turns()
    limit = asyncio.Semaphore(work.at_once)

    async def turn(http: aiohttp.ClientSession, agent: Agent, number: int) -> None:
        seed = agent.number * 1000 + number
        length = work.tool if agent.messages else work.prompt
        text = words(40_000_000 + seed, length) if work.model == "simulator" else common_words(seed, length)
        content = f"{agent.number} {text}"
        agent.messages.append({"role": "user", "content": content})
        session = {"session_control": {"session_id": f"agent-{agent.number}", "timeout": 600, "action": "open"}}
        body = {"model": work.model, "messages": agent.messages, "max_tokens": work.answer, "seed": seed, "nvext": session}
        async with limit:
            answer = await ask(http, server.url, body)
        if agent.tokens:
            seen.waits.append(answer.wait)
            seen.cached += answer.usage["prompt_tokens_details"]["cached_tokens"]
            seen.known += agent.tokens
        agent.tokens = answer.usage["prompt_tokens"] + answer.usage["completion_tokens"]
        agent.messages.append({"role": "assistant", "content": answer.text})

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        for number in rounds:
            await asyncio.gather(*[turn(http, agent, number) for agent in agents])
    return seen


async def measured(work: Work, *flags: str) -> tuple[Turns, dict[str, float]]:
    with serving(*flags) as server:
        seen = await take_turns(server, work, [Agent(number) for number in range(work.agents)], range(work.turns))
        return seen, events_of(server)


def events_of(server: Process) -> dict[str, float]:
    pairs = [(tier, event) for tier in ("host", "disk") for event in ("stored", "loaded", "evicted", "declined", "corrupt", "full", "busy")]
    found = {f"{tier} {event}": server.metric("penstock_kv_tier_events_total", tier=tier, event=event) for tier, event in pairs}
    return {name: count for name, count in found.items() if count}


def show(name: str, seen: Turns, events: dict[str, float]) -> None:
    counts = ", ".join(f"{event} {count:,.0f}" for event, count in events.items())
    print(f"{name:28} reuse {seen.reuse:6.1%}   TTFT p50 {seen.p50 * 1000:8.1f} ms   {counts}", flush=True)


async def compare(work: Work, engine: Sequence[str], host_gib: float) -> bool:
    pool = work.blocks // 4
    print(f"{work.agents} agents, {work.turns} turns, {work.blocks:,} blocks in all; the small device has {pool:,}", flush=True)
    runs = {
        "an unlimited device": [f"--kv-blocks={2 * work.blocks}"],
        "a small device": [f"--kv-blocks={pool}"],
        "a small device, host memory": [f"--kv-blocks={pool}", f"--kv-host-memory={host_gib}"],
    }
    seen: list[Turns] = []
    for name, flags in runs.items():
        turns, events = await measured(work, *engine, *flags)
        show(name, turns, events)
        seen.append(turns)
    unlimited, without, tier = seen
    return report(
        {
            f"reuse of at least {MIN_HITS:.0%} with the unlimited device": unlimited.reuse >= MIN_HITS,
            f"reuse at least {MIN_REUSE:.0%} of the unlimited device's": tier.reuse >= MIN_REUSE * unlimited.reuse,
            f"TTFT p50 at least {MIN_SPEEDUP:g} times better than without": tier.p50 * MIN_SPEEDUP <= without.p50,
        }
    )


def simulated(arguments: argparse.Namespace) -> Work:
    return Work(agents=arguments.agents, prompt=arguments.prompt)


async def reuse(arguments: argparse.Namespace) -> bool:
    work = simulated(arguments)
    return await compare(work, ["--engine=simulator", *RATES], 2 * work.blocks * BLOCK_BYTES / 2**30)


async def embedded(arguments: argparse.Namespace) -> bool:
    model = [f"--model={arguments.model}"] if arguments.model else []
    work = Work(
        agents=arguments.embedded_agents, prompt=arguments.embedded_prompt, tool=32, answer=8, turns=3, at_once=1, model=arguments.name
    )
    return await compare(work, ["--engine=embedded", "--device=cpu", f"--served-name={arguments.name}", *model], arguments.host_gib)


async def slow(arguments: argparse.Namespace) -> bool:
    work = simulated(arguments)
    flags = ["--engine=simulator", *RATES, f"--kv-blocks={work.blocks // 4}", f"--kv-host-memory={2 * work.blocks * BLOCK_BYTES / 2**30}"]
    without, _ = await measured(work, *flags[:-1])
    seen, events = await measured(work, *flags, "--kv-host-gbps=10")
    show("without host memory", without, {})
    show("host memory at 1.25 GB/s", seen, events)
    return report(
        {
            "nothing is loaded, nothing goes there": not events.get("host loaded") and not events.get("host stored"),
            "as fast as without": seen.p50 <= 1.1 * without.p50,
        }
    )


async def restart(arguments: argparse.Namespace) -> bool:
    work = simulated(arguments)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        flags = ["--engine=simulator", *RATES, f"--kv-blocks={work.blocks // 4}", f"--kv-disk={folder}"]
        flags += [f"--kv-host-memory={work.blocks / 4 * BLOCK_BYTES / 2**30}", f"--kv-disk-size={2 * work.blocks * BLOCK_BYTES / 2**30}"]
        server = stack.enter_context(serving(*flags))
        agents = [Agent(number) for number in range(work.agents)]
        await take_turns(server, work, agents, range(work.turns - 1))
        before = await take_turns(server, work, agents, range(work.turns - 1, work.turns))
        show("before", before, events_of(server))
        for child in server.children("worker").values():
            os.kill(child.pid, signal.SIGKILL)
        # The link is lost before the new worker comes.
        while not server.metric("penstock_links_lost_total") or not server.metric("penstock_workers"):  # noqa: ASYNC110, another process
            await asyncio.sleep(0.02)
        after = await take_turns(server, work, agents, range(work.turns, work.turns + 1))
        show("after the worker was killed", after, events_of(server))
        return report(
            {
                f"reuse of at least {MIN_HITS:.0%} before": before.reuse >= MIN_HITS,
                f"at least {MIN_KEPT:.0%} of the hits are kept": after.reuse >= MIN_KEPT * before.reuse,
            }
        )


def report(checks: dict[str, bool]) -> bool:
    for name, is_met in checks.items():
        print(f"{'ok' if is_met else 'FAILED':8}{name}", flush=True)
    return all(checks.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("reuse", "restart", "slow", "embedded"))
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--model", help="directory of the embedded engine's model")
    parser.add_argument("--name", default="bench")
    parser.add_argument("--embedded-agents", type=int, default=8)
    parser.add_argument("--embedded-prompt", type=int, default=400)
    parser.add_argument("--host-gib", type=float, default=2.0)
    arguments = parser.parse_args()
    run = {"reuse": reuse, "restart": restart, "slow": slow, "embedded": embedded}[arguments.what]
    sys.exit(0 if asyncio.run(run(arguments)) else 1)


if __name__ == "__main__":
    main()
