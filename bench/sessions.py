"""Measures sessions: what they save, that they leak nothing, and that two front ends agree on them; and what one key learns of another's.

    python bench/sessions.py pay        64 agents that pause for tools, among one-off requests, with sessions and without
    python bench/sessions.py leak       100,000 sessions, half closed and half expired, and a front end that is killed
    python bench/sessions.py share      two front ends with one Redis, and turns that alternate between them
    python bench/sessions.py guess      one key guesses 1,000 prompts; another has sent half of them. With prefixes apart, and shared

Real processes with the simulated engine, on loopback. Exits with 1 when a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

import programs
from penstock.backends.simulator import tokens_between
from penstock.text.tokenizers.words import WordTokenizer
from servers import SECRET, Process, serving

WORDS = WordTokenizer()
AGENTS, TURNS, ONE_OFFS = 64, 20, 500
FIRST_PROMPT, TOOL_RESULT, ANSWER, ONE_OFF_PROMPT = 2000, 300, 80, 12_000
MIN_PAUSE, MAX_PAUSE = 2.0, 30.0
MIN_REUSED, MAX_SLOWDOWN = 0.95, 1.10
GUESSES, GUESSED_PROMPT = 1000, 1000
# Standard deviations of the rank test. Beyond it, right and wrong guesses do not take the same time.
MAX_DEVIATION = 3.0


def words(seed: int, count: int) -> str:
    """Text of `count` tokens that no other seed gives."""
    return WORDS.decode(tokens_between(seed, 0, count, WORDS.ordinary_ids))


@dataclass
class Seen:
    """The measurements of one server's clients."""

    reused: list[float] = field(default_factory=list)
    agent_waits: list[float] = field(default_factory=list)
    one_off_waits: list[float] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


@dataclass
class Answer:
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    nvext: dict[str, Any] = field(default_factory=dict)
    wait: float = 0.0


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Answer:
    """One streamed chat, read to its end."""
    answer, began = Answer(), time.perf_counter()
    body = {"model": "simulator", **body, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            answer.wait = answer.wait or time.perf_counter() - began
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            answer.usage = event.get("usage") or answer.usage
            answer.nvext = event.get("nvext") or answer.nvext
            for choice in event["choices"]:
                answer.text += choice["delta"].get("content") or ""
    return answer


class Agent:
    """Works through its turns: asks, appends the answer and a tool's result, pauses."""

    def __init__(self, number: int, url: str, seen: Seen, with_session: bool) -> None:
        self._number = number
        self._url = url
        self._seen = seen
        self._with_session = with_session
        self._random = random.Random(number)

    async def run(self, http: aiohttp.ClientSession) -> None:
        messages = [{"role": "user", "content": f"{self._number}{words(10_000_000 + self._number, FIRST_PROMPT)}"}]
        left = 0
        await asyncio.sleep(self._random.uniform(0, MAX_PAUSE / 2))
        for turn in range(TURNS):
            body: dict[str, object] = {"messages": messages, "max_tokens": ANSWER, "seed": self._number * 1000 + turn}
            if self._with_session:
                body["nvext"] = {"session_control": {"session_id": f"agent-{self._number}", "timeout": 120, **_action(turn)}}
            answer = await ask(http, self._url, body)
            self._seen.agent_waits.append(answer.wait)
            if left:
                self._seen.reused.append(answer.usage["prompt_tokens_details"]["cached_tokens"] / left)
            state = answer.nvext.get("session", {}).get("state", "none")
            self._seen.states[state] = self._seen.states.get(state, 0) + 1
            left = answer.usage["prompt_tokens"] + answer.usage["completion_tokens"]
            tool = words(20_000_000 + self._number * 1000 + turn, self._random.randint(TOOL_RESULT // 2, TOOL_RESULT * 3 // 2))
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": tool}]
            await asyncio.sleep(self._random.uniform(MIN_PAUSE, MAX_PAUSE))


def _action(turn: int) -> dict[str, str]:
    return {0: {"action": "open"}, TURNS - 1: {"action": "close"}}.get(turn, {})


async def press(http: aiohttp.ClientSession, url: str, seen: Seen, seconds: float) -> None:
    """Sends one-off requests at random times."""
    numbers = random.Random(5)
    moments = sorted(numbers.uniform(0, seconds) for _ in range(ONE_OFFS))

    async def one(number: int, moment: float) -> None:
        await asyncio.sleep(moment)
        content = f"once {number}{words(30_000_000 + number, ONE_OFF_PROMPT)}"
        answer = await ask(http, url, {"messages": [{"role": "user", "content": content}], "max_tokens": ANSWER, "seed": number})
        seen.one_off_waits.append(answer.wait)

    await asyncio.gather(*[one(number, moment) for number, moment in enumerate(moments)])


async def work(url: str, with_session: bool) -> Seen:
    seen = Seen()
    seconds = TURNS * (MIN_PAUSE + MAX_PAUSE) / 2
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        agents = [Agent(number, url, seen, with_session).run(http) for number in range(AGENTS)]
        outcomes = await asyncio.gather(*agents, press(http, url, seen, seconds), return_exceptions=True)
    seen.errors = [repr(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
    return seen


async def pay(arguments: argparse.Namespace) -> bool:
    flags = ["--engine=simulator", "--workers=2", "--step-ms=20", "--prefill-rate=20000", "--lease-share=0.9"]
    flags.append(f"--kv-blocks={arguments.kv_blocks}")
    with serving(*flags) as with_sessions, serving(*flags) as without:
        on, off = await asyncio.gather(work(with_sessions.url, with_session=True), work(without.url, with_session=False))
        held = with_sessions.metric("penstock_sessions"), with_sessions.metric("penstock_kv_blocks", state="leased")
        evicted = [server.metric("penstock_kv_blocks_evicted_total") for server in (with_sessions, without)]
    print(f"{AGENTS} agents × {TURNS} turns, pauses {MIN_PAUSE:g}-{MAX_PAUSE:g} s, {ONE_OFFS} one-off requests; 2 × {flags[-1]}")
    print(f"{'':34}{'sessions':>12}{'without':>12}")
    worst, all_reused = statistics.fmean(sorted(on.reused)[: len(on.reused) // 100]), min(on.reused)
    rows: list[tuple[str, Callable[[Seen], float]]] = [
        ("reused of the turn before, mean", lambda seen: statistics.fmean(seen.reused)),
        ("reused of the turn before, p1", lambda seen: percentile(seen.reused, 1)),
        ("turns below 95 %", lambda seen: float(sum(reused < MIN_REUSED for reused in seen.reused))),
        ("agents' wait p50, s", lambda seen: percentile(seen.agent_waits, 50)),
        ("agents' wait p99, s", lambda seen: percentile(seen.agent_waits, 99)),
        ("one-off wait p50, s", lambda seen: percentile(seen.one_off_waits, 50)),
        ("one-off wait p99, s", lambda seen: percentile(seen.one_off_waits, 99)),
        ("any wait p99, s", lambda seen: percentile(seen.agent_waits + seen.one_off_waits, 99)),
    ]
    for name, value in rows:
        print(f"{name:34}{value(on):12.3f}{value(off):12.3f}")
    print(f"{'blocks evicted':34}{evicted[0]:12,.0f}{evicted[1]:12,.0f}")
    print(f"states {on.states}; worst percent {worst:.3f}, least {all_reused:.3f}; errors {on.errors[:3]} {off.errors[:3]}")
    print(f"left on the workers: sessions {held[0]:.0f}, leased blocks {held[1]:.0f}")
    waits = [percentile(seen.agent_waits + seen.one_off_waits, 99) for seen in (on, off)]
    one_off = [percentile(seen.one_off_waits, 99) for seen in (on, off)]
    checks = {
        "every turn reuses 95 % of the tokens of the turn before": all_reused >= MIN_REUSED,
        "p99 of all waits at most 10 % above": waits[0] <= MAX_SLOWDOWN * waits[1],
        "p99 of one-off waits at most 10 % above": one_off[0] <= MAX_SLOWDOWN * one_off[1],
        "no errors": not on.errors and not off.errors,
        "no session and no lease left": held == (0, 0),
    }
    return report(checks)


async def leak(arguments: argparse.Namespace) -> bool:
    flags = [
        "--engine=simulator",
        "--workers=2",
        "--step-ms=2",
        "--max-sessions=1000000",
        "--sessions-per-key=1000000",
        "--session-grace=5",
    ]
    with serving(*flags) as server:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            # The first sessions bring every process to its peak memory, which the allocator then keeps.
            await open_and_leave(http, server, "warm", arguments.sessions // 2)
            before = await settled(server)
            print(f"before: {before}")
            began = time.perf_counter()
            await open_and_leave(http, server, "leak", arguments.sessions)
            peak = {name: server.metric(name) for name in ("penstock_sessions", "penstock_sessions_known")}
            print(f"{arguments.sessions:,} sessions in {time.perf_counter() - began:.0f} s; still open then: {peak}")
            after = await settled(server)
            print(f"after:  {after}")
            ratios = {name: after[name] / before[name] for name in before if name.startswith("rss ")}
            print("RSS after / before:", {name: round(ratio, 3) for name, ratio in ratios.items()})
            await open_many(http, server, "orphan", 2000, 5)
            (front_end,) = server.children("frontend").values()
            orphaned = server.metric("penstock_sessions")
            front_end.kill()
            left = await orphans(server)
            print(f"front end killed with {orphaned:.0f} sessions on the workers; after timeout and grace {left:.0f} are left")
        log = [line for line in server.log if "Traceback" in line or ("ERROR" in line and "died" not in line)]
    checks = {
        "RSS of each process back within 5 %": max(ratios.values()) <= 1.05,
        "no KV held": after["leased blocks"] == 0 and after["used blocks"] == 0,
        "no session left": after["sessions"] == 0 and after["sessions known"] == 0,
        "no task left": after["tasks"] <= before["tasks"],
        "a killed front end leaves none": orphaned >= 1900 and left == 0,
        f"nothing in the log {log[:2]}": not log,
    }
    return report(checks)


async def open_and_leave(http: aiohttp.ClientSession, server: Process, name: str, count: int) -> None:
    """Closes one half, by DELETE or by a turn. The other half expires."""
    at_once = asyncio.Semaphore(128)

    async def one(number: int) -> None:
        async with at_once:
            session = f"{name}-{number}"
            await turn(http, server.url, session, "open", 10)
            if number % 4 == 0:
                async with http.delete(f"{server.url}/v1/sessions/{session}") as response:
                    assert response.status == 200, await response.text()
            elif number % 4 == 1:
                await turn(http, server.url, session, "close", 10)

    for start in range(0, count, 5000):
        await asyncio.gather(*[one(number) for number in range(start, min(count, start + 5000))])


async def open_many(http: aiohttp.ClientSession, server: Process, name: str, count: int, seconds: float) -> None:
    await asyncio.gather(*[turn(http, server.url, f"{name}-{number}", "open", seconds) for number in range(count)])


async def turn(http: aiohttp.ClientSession, url: str, session: str, action: str | None, seconds: float, tokens: int = 40) -> dict[str, Any]:
    control = {"session_id": session, "timeout": seconds, **({} if action is None else {"action": action})}
    body = {"model": "simulator", "prompt": f"{session}{words(hash(session) % 2**40, tokens)}", "max_tokens": 2, "seed": 1}
    async with http.post(f"{url}/v1/completions", json={**body, "nvext": {"session_control": control}}) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def settled(server: Process) -> dict[str, float]:
    """Sessions, blocks and memory after everything has expired."""
    for _ in range(120):
        await asyncio.sleep(1)
        if not (server.metric("penstock_sessions") or server.metric("penstock_sessions_known")):
            break
    await asyncio.sleep(3)
    processes = {**server.children("worker"), **server.children("frontend")}
    return {
        **{f"rss {name}": process.memory_info().rss / 2**20 for name, process in processes.items()},
        "sessions": server.metric("penstock_sessions"),
        "sessions known": server.metric("penstock_sessions_known"),
        "leased blocks": server.metric("penstock_kv_blocks", state="leased"),
        "used blocks": server.metric("penstock_kv_blocks", state="used"),
        "tasks": server.metric("penstock_tasks"),
    }


async def orphans(server: Process) -> float:
    """Sessions left on the workers after timeout and grace, as the new front end sees them."""
    deadline = time.monotonic() + 60
    await asyncio.sleep(5 + 5)
    while time.monotonic() < deadline:
        try:
            left, workers = server.metric("penstock_sessions"), server.metric("penstock_workers")
        except OSError:
            left, workers = -1.0, 0
        if left == 0 and workers == 2:
            return 0.0
        await asyncio.sleep(0.5)
    return left


async def share(arguments: argparse.Namespace) -> bool:
    with sharing(workers=4, front_ends=2) as urls:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            at_once = asyncio.Semaphore(64)
            outcomes = await asyncio.gather(*[_alternate(http, at_once, urls, number) for number in range(arguments.sessions)])
            raced = await asyncio.gather(*[_race(http, urls, number) for number in range(100)])
            lists = [await _all_sessions(http, url) for url in urls]
    wrong = [outcome for outcome in outcomes if outcome is not None]
    print(f"{arguments.sessions:,} sessions × {SHARED_TURNS} turns, alternating: {len(wrong)} did not stay with their worker {wrong[:3]}")
    split = [outcome for outcome in raced if len(outcome) != 1]
    print(f"100 ids opened on both at once: {len(split)} have more than one winner {split[:3]}")
    same = lists[0] == lists[1]
    print(f"the front ends list {len(lists[0])} and {len(lists[1])} sessions, {'the same' if same else 'NOT the same'}")
    checks = {"all turns hit their worker": not wrong, "one winner per race": not split, "both list the same": same and bool(lists[0])}
    return report(checks)


SHARED_TURNS = 6


async def _alternate(http: aiohttp.ClientSession, at_once: asyncio.Semaphore, urls: list[str], number: int) -> str | None:
    """Runs one session whose turns alternate between the front ends. Returns what went wrong, or None."""
    workers = set()
    for step, url in zip(range(SHARED_TURNS), itertools.cycle(urls[number % 2 :] + urls[: number % 2]), strict=False):
        async with at_once:
            answer = await turn(http, url, f"shared-{number}", "open" if step == 0 else None, 300, tokens=200)
        told_of = answer["nvext"]["session"]
        workers.add(told_of["worker"])
        if told_of["state"] != "open":
            return f"session {number}, turn {step}: {told_of}"
        if step and answer["usage"]["prompt_tokens_details"]["cached_tokens"] < 192:
            return f"session {number}, turn {step}: cached {answer['usage']}"
    return None if len(workers) == 1 else f"session {number}: {workers}"


async def _race(http: aiohttp.ClientSession, urls: list[str], number: int) -> set[str]:
    """Opens a session on both front ends at once. Returns the workers that they name and that its next turns use."""
    session = f"race-{number}"
    await asyncio.gather(*[turn(http, url, session, "open", 300) for url in urls])
    known = set()
    for url in urls:
        async with http.get(f"{url}/v1/sessions/{session}") as response:
            known.add((await response.json())["worker"])
        known.add((await turn(http, url, session, None, 300))["nvext"]["session"]["worker"])
    return known


async def _all_sessions(http: aiohttp.ClientSession, url: str) -> dict[str, str]:
    found: dict[str, str] = {}
    after, more = "", True
    while more:
        async with http.get(f"{url}/v1/sessions", params={"limit": "1000", **({"after": after} if after else {})}) as response:
            page = await response.json()
        found |= {entry["id"]: entry["worker"] for entry in page["data"]}
        after, more = page["data"][-1]["id"] if page["data"] else "", page["has_more"]
    return found


@contextmanager
def sharing(workers: int, front_ends: int) -> Iterator[list[str]]:
    """Starts workers and front ends that share a Redis. Yields the front ends' URLs."""
    redis = programs.redis_server()
    if redis is None:
        raise SystemExit("there is no redis-server: run `make setup`, which installs one")
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "redis.sock"
        store = subprocess.Popen([redis, "--port", "0", "--unixsocket", str(socket), "--save", ""], stdout=subprocess.DEVNULL)
        processes: list[Process] = []
        try:
            while not socket.exists():
                time.sleep(0.05)
            url = f"--store=unix://{socket}"
            secret = {"PENSTOCK_LINK_SECRET": SECRET}
            for number in range(workers):
                listen = f"--listen=unix:{directory}/worker-{number}.sock"
                flags = ["--engine=simulator", "--step-ms=2", "--max-sessions=100000"]
                processes.append(Process("worker", f"--name=worker-{number}", listen, url, *flags, environment=secret))
            fronts = [
                Process("frontend", f"--name=frontend-{number}", "--port=0", url, "--sessions-per-key=100000", environment=secret)
                for number in range(front_ends)
            ]
            processes += fronts
            for front in fronts:
                front.wait_ready()
                deadline = time.monotonic() + 60
                while front.metric("penstock_workers") < workers:
                    assert time.monotonic() < deadline, front.log
                    time.sleep(0.1)
            yield [front.url for front in fronts]
        finally:
            for process in reversed(processes):
                process.stop()
            store.terminate()
            store.wait()


@dataclass
class Guesses:
    """What the guesses of one kind showed."""

    waits: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    routes: list[str] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        waits = ", ".join(f"p{percent} {percentile(self.waits, percent) * 1000:.2f}" for percent in (10, 50, 90))
        workers = ", ".join(f"{worker} {self.workers.count(worker)}" for worker in sorted(set(self.workers)))
        return f"first token in ms: {waits}; cached tokens {sorted(set(self.cached))}; routes {sorted(set(self.routes))}; {workers}"


async def guess(_: argparse.Namespace) -> bool:
    """The attacker asks one at a time, on an idle server: nothing else disturbs its clock."""
    checks: dict[str, bool] = {}
    for shares in (False, True):
        flags = [
            "--engine=simulator",
            "--workers=2",
            "--kv-blocks=150000",
            "--prefill-rate=50000",
            *(["--share-prefixes"] if shares else []),
        ]
        with serving(*flags, environment={"PENSTOCK_API_KEY": "victim,attacker"}) as server:
            right, wrong = await _attack(server.url)
        deviation = _rank_deviation(right.waits, wrong.waits)
        print(f"\nprefixes {'shared' if shares else 'apart'}, {GUESSES} guesses of {GUESSED_PROMPT} tokens")
        for name, guesses in (("right", right), ("wrong", wrong)):
            print(f"  {name}: {guesses}")
        print(f"  rank test: {deviation:+.2f} standard deviations")
        if shares:
            checks["with shared prefixes the attack succeeds, so it would be seen"] = deviation < -10 and min(right.cached) > 900
        else:
            checks["no guess finds anything cached"] = {*right.cached, *wrong.cached} == {0}
            checks["all routes have the same reason"] = len({*right.routes, *wrong.routes}) == 1
            share = [guesses.workers.count("worker-0") / len(guesses.workers) for guesses in (right, wrong)]
            checks["both kinds go to the same workers as often"] = abs(share[0] - share[1]) < MAX_DEVIATION / GUESSES**0.5
            checks[f"the times to the first token differ by less than {MAX_DEVIATION:g} standard deviations"] = (
                abs(deviation) < MAX_DEVIATION
            )
    return report(checks)


async def _attack(url: str) -> tuple[Guesses, Guesses]:
    def body(seed: int) -> dict[str, object]:
        content = words(seed, GUESSED_PROMPT)
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "nvext": {"extra_fields": ["route"]}}

    kinds = [Guesses(), Guesses()]
    secrets, wrongs = range(40_000_000, 40_000_000 + GUESSES // 2), range(50_000_000, 50_000_000 + GUESSES // 2)
    victim, attacker = [aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) for key in ("victim", "attacker")]
    async with victim, attacker:
        for seed in secrets:
            await ask(victim, url, body(seed))
        tries = [(kind, seed) for kind, seeds in zip(kinds, (secrets, wrongs), strict=True) for seed in seeds]
        random.Random(0).shuffle(tries)
        for kind, seed in tries:
            answer = await ask(attacker, url, body(seed))
            (route,) = answer.nvext["route"]
            kind.waits.append(answer.wait)
            kind.cached.append(answer.usage["prompt_tokens_details"]["cached_tokens"])
            kind.workers.append(route["worker"])
            kind.routes.append(f"{route['reason']}, overlap {route['overlap_blocks']}")
    return kinds[0], kinds[1]


def _rank_deviation(first: list[float], second: list[float]) -> float:
    """Mann and Whitney's test: how far the rank sum of the first is from what chance gives, in standard deviations. Negative: smaller."""
    ranked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks = sum(rank for rank, (_, group) in enumerate(ranked, 1) if group == 0)
    count, other = len(first), len(second)
    expected = count * (count + other + 1) / 2
    return (ranks - expected) / math.sqrt(count * other * (count + other + 1) / 12)


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def report(checks: dict[str, bool]) -> bool:
    for check, holds in checks.items():
        print(f"  {'ok  ' if holds else 'MISS'} {check}")
    return all(checks.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pay", "leak", "share", "guess"])
    parser.add_argument("--sessions", type=int, help="number of sessions (default: leak 100,000, share 1,000)")
    parser.add_argument("--kv-blocks", type=int, default=26_000, help="pay: KV blocks of each worker")
    arguments = parser.parse_args()
    arguments.sessions = arguments.sessions or (100_000 if arguments.what == "leak" else 1000)
    run = {"pay": pay, "leak": leak, "share": share, "guess": guess}[arguments.what]
    return 0 if asyncio.run(run(arguments)) else 1


if __name__ == "__main__":
    sys.exit(main())
