"""Malformed bodies to every route that takes one, and requests that no client library would send."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from fuzzing.examples import examples
from fuzzing.mutations import Malformed, Mutations
from fuzzing.target import MAX_BODY_BYTES, Findings, Target

CONCURRENCY = 16
# Each one takes the whole time limit.
MAX_HANGS = 5
GROWTH_SHARE = 0.1
CUT = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError)


async def run_bodies(target: Target, cases: int, seed: int, findings: Findings) -> None:
    """Sends to all routes in turn."""
    paths = target.document["paths"]
    routes = {
        path: _mutations(path, methods["post"], target, seed) for path, methods in paths.items() if "requestBody" in methods.get("post", {})
    }
    kinds: Counter[str] = Counter()
    queue: Iterator[tuple[str, Malformed]] = ((path, one.next()) for _ in range(-(-cases // len(routes))) for path, one in routes.items())
    timeout = aiohttp.ClientTimeout(total=target.pace.seconds)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=CONCURRENCY)) as session:

        async def work(until: int) -> None:
            for path, malformed in queue:
                if findings.cases >= until or findings.problems["no answer"] >= MAX_HANGS:
                    return
                kinds[malformed.kind] += 1
                await _send(session, target, path, malformed, findings)

        # The largest first, all at once: they bring each process to its peak memory.
        heavy = [(path, body) for path, one in routes.items() for body in one.heaviest() for _ in range(CONCURRENCY // 4)]
        await asyncio.gather(*(_send(session, target, path, body, findings) for path, body in heavy))
        memory = [target.memory()]
        for tenth in range(1, 11):
            await asyncio.gather(*(work(cases * tenth // 10) for _ in range(CONCURRENCY)))
            if tenth in (1, 10):
                await _send_broken(target, seed, findings)
            memory.append(target.memory())
    print("bodies: " + ", ".join(f"{kind} {count:,}" for kind, count in sorted(kinds.items())))
    _compare_memory(memory, target.pace.growth, findings)


def _mutations(path: str, described: Mapping[str, Any], target: Target, seed: int) -> Mutations:
    content = described["requestBody"]["content"]["application/json"]
    aimed = [
        {**example, "model": target.model} if "model" in content["example"] else example for example in examples(path, content["example"])
    ]
    fields = list(target.document["components"]["schemas"][content["schema"]["$ref"].rsplit("/", 1)[1]]["properties"])
    return Mutations(aimed, fields, seed, MAX_BODY_BYTES)


async def _send(session: aiohttp.ClientSession, target: Target, path: str, malformed: Malformed, findings: Findings) -> None:
    route = f"POST {path}"
    shown = f"to {route} {malformed.kind} {dict(malformed.headers)} {len(malformed.body):,} bytes: {malformed.body[:400]!r}"
    url = target.server.url + path.replace("{id}", target.conversation)
    try:
        status, content = await _post(session, url, malformed)
    except CUT as error:
        findings.count(route, "cut")
        # Such headers are refused before the application sees them. A body over the limit is not read to its end.
        if not malformed.headers and len(malformed.body) <= MAX_BODY_BYTES:
            findings.report("no answer", f"{error!r} {shown}")
        return
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        findings.count(route, "none")
        findings.report("no answer", f"{error!r} {shown}")
        return
    findings.count(route, str(status))
    if status >= 500:
        findings.report("5xx", f"{status} {content[:300]!r} {shown}")
    elif status >= 400 and not malformed.headers and not _says_something(content):
        findings.report("an error without a message", f"{status} {content[:300]!r} {shown}")


async def _post(session: aiohttp.ClientSession, url: str, malformed: Malformed) -> tuple[int, bytes]:
    try:
        async with session.post(url, data=malformed.body, headers=malformed.headers) as response:
            return response.status, await response.read()
    except CUT:
        # The connection may have been closed for the request before, just when it was used again.
        async with session.post(url, data=malformed.body, headers={**malformed.headers, "connection": "close"}) as response:
            return response.status, await response.read()


def _says_something(content: bytes) -> bool:
    try:
        return bool(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


# Requests that no client library would send.


async def _send_broken(target: Target, seed: int, findings: Findings) -> None:
    drawn = random.Random(seed)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    broken = {
        "content-length too large": head + b"content-length: 100\r\n\r\n{}",
        "content-length too small": head + b'content-length: 3\r\n\r\n{"model": "x", "prompt": "y"}',
        "content-length negative": head + b"content-length: -1\r\n\r\n{}",
        "content-length huge": head + b"content-length: 99999999999999999999999\r\n\r\n{}",
        "content-length over the limit": head + b"content-length: %d\r\n\r\n{}" % (MAX_BODY_BYTES + 1),
        "two content-lengths": head + b"content-length: 2\r\ncontent-length: 5\r\n\r\n{}",
        "length and chunks": head + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "chunk without an end": head + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n",
        "chunk of no size": head + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        "chunk of a huge size": head + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}\r\n",
        "no host": b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}",
        "a space in the path": b"GET /v1/models/a b HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "a NUL in a header": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-session-id: a\x00b\r\n\r\n",
        "a path that is no UTF-8": b"GET /v1/models/%ff%fe HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "a query that is no UTF-8": b"GET /v1/sessions?limit=%ff&after=%fe%00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "a very long path": b"GET /v1/models/" + b"a" * 60_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "HTTP of another kind": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "noise": drawn.randbytes(500) + b"\r\n\r\n",
        "nothing": b"",
    }
    await asyncio.gather(*(_send_raw(target, name, data, findings) for name, data in broken.items()))


async def _send_raw(target: Target, name: str, data: bytes, findings: Findings) -> None:
    """Sends it and waits for an answer. The server must not wait for more for ever."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.server.port)
    try:
        writer.write(data)
        async with asyncio.timeout(target.pace.seconds):
            answer = await reader.read(65_536) if data else b""
    except (ConnectionError, BrokenPipeError):
        answer = b""
    except TimeoutError:
        findings.count("broken requests", "none")
        findings.report("no answer", f"to {name}")
        return
    finally:
        writer.close()
    status = answer.split(b" ")[1].decode() if answer.startswith(b"HTTP/") else "cut"
    findings.count("broken requests", status)
    if status.startswith("5"):
        findings.report("5xx", f"{answer[:300]!r} to {name}")


def _compare_memory(memory: Sequence[Mapping[str, int]], growth: int, findings: Findings) -> None:
    """Compares memory after the largest requests and after each tenth. Bounded stores are full after half of them."""
    half, last = memory[len(memory) // 2], memory[-1]
    for name in last:
        print(f"memory of {name}, MiB at the start and after each tenth: " + " ".join(f"{one.get(name, 0) / 2**20:.1f}" for one in memory))
        if name not in half:
            findings.report("a process that is not the same", name)
        elif last[name] > half[name] * (1 + GROWTH_SHARE) + growth:
            findings.report("memory grows", name)
