"""Shows that hostile URLs and files harm nobody.

    python bench/images/hostile.py [urls] [files] [--files N] [--seed N] [--real-time]

urls: all tricks of tricks.py against the product's fetcher. Canaries listen on this machine (127.0.0.1 and ::1, ports 80 and 443 if they
are free): none may see a connection, and none may be tried to any address but the public one.
files: broken and hostile files, and mutations of good ones, to a real server of the simulator, four at a time. Each answer must be a status
200, or a 400 that names the field. The front end and its processes may not grow, and its event loop may not stand still for 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import io
import json
import os
import random
import ssl
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from PIL import Image

from images.tricks import ALLOWED, PUBLIC, Trick, tricks
from penstock.config.media import DEFAULTS, parse_media_host
from penstock.media.fetch import HttpFetcher, Streams, connect
from penstock.wire.errors import RequestError
from servers import serving

MAX_STALL_SECONDS = 0.020
MAX_GROWTH = 400 * 2**20
"""The server has 256 MiB for images."""

FIELD = "messages[0].content[1]"


class Canaries:
    """Servers that must not be connected to, one that may, and what was tried."""

    def __init__(self) -> None:
        self.seen = 0
        self.tried: set[str] = set()
        self.port = 0
        self.trick: Trick | None = None
        self.servers: list[asyncio.Server] = []

    async def start(self) -> list[str]:
        open_server = await asyncio.start_server(self._redirect, "127.0.0.1", 0)
        self.port = open_server.sockets[0].getsockname()[1]
        self.servers.append(open_server)
        places = []
        for host, port in (("127.0.0.1", 80), ("::1", 80), ("127.0.0.1", 443), ("::1", 443)):
            try:
                self.servers.append(await asyncio.start_server(self._sing, host, port))
                places.append(f"{host} port {port}")
            except OSError as error:
                print(f"no canary on {host} port {port}: {error}", file=sys.stderr)
        return places

    async def resolve(self, host: str, port: int) -> list[str]:  # noqa: ARG002
        assert self.trick is not None
        found = self.trick.addresses.get(host)
        if found is None:
            raise OSError(f"{host} does not exist")
        return found.pop(0) if len(found) > 1 else found[0]

    async def connect(self, address: str, port: int, tls: ssl.SSLContext | None, name: str | None) -> Streams:
        """To the one public host, which is ours; or really to where it must not."""
        if address == PUBLIC and port in (80, 443):
            return await asyncio.open_connection("127.0.0.1", self.port)
        self.tried.add(f"{address} port {port}")
        return await connect(address, port, tls, name)

    async def _redirect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.trick is not None
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        target = next((to for url, to in self.trick.redirects.items() if url.endswith(path)), "http://127.0.0.1/")
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: %s\r\n\r\n" % target.encode())
        writer.close()

    async def _sing(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:  # noqa: ARG002
        self.seen += 1
        writer.close()


async def try_urls() -> bool:
    canaries = Canaries()
    places = await canaries.start()
    settings = replace(DEFAULTS, hosts=(parse_media_host(ALLOWED),), timeout=5.0)
    fetcher = HttpFetcher(settings, resolve=canaries.resolve, connect=canaries.connect)
    outcomes: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for trick in tricks():
        canaries.trick = trick._replace(addresses={host: list(found) for host, found in trick.addresses.items()})
        names[trick.name] += 1
        try:
            await fetcher.fetch(trick.url, "", 1.0, _take)
            outcomes["fetched"] += 1
        except RequestError as error:
            outcomes[error.code] += 1
    for server in canaries.servers:
        server.close()
    print(f"{sum(names.values())} tricks ({', '.join(f'{name} {count}' for name, count in names.items())})")
    print(f"canaries on {', '.join(places)}: {canaries.seen} connections; other connections that were tried: {sorted(canaries.tried) or 0}")
    print(f"answers: {dict(outcomes)}")
    return not (canaries.seen or canaries.tried or outcomes["fetched"])


async def _take(size: int) -> None:
    pass


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2, rows: bytes | None = None) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    data = zlib.compress(bytes(height * (3 * width + 1)) if rows is None else rows, 9)
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def hostile() -> Iterator[tuple[str, bytes]]:
    """Files that somebody made by hand."""
    bomb = zlib.compress(bytes(150 * 2**20), 9)
    yield "text bomb", png(8, 8, chunk(b"zTXt", b"a\0\0" + bomb))
    yield "many text bombs", png(8, 8, *[chunk(b"zTXt", b"a%d\0\0" % number + zlib.compress(bytes(2**20), 9)) for number in range(200)])
    yield "international text bomb", png(8, 8, chunk(b"iTXt", b"a\0\1\0\0\0" + bomb))
    yield "profile bomb", png(8, 8, chunk(b"iCCP", b"a\0\0" + bomb))
    yield "pixels that compress well", png(7000, 7000)
    yield "more rows than it has", png(8, 8, rows=bytes(100 * 2**20))
    yield "no rows", png(3000, 3000, rows=b"")
    for size in ((2**31 - 1, 2**31 - 1), (2**32 - 1, 1), (100_000, 100_000), (0, 5), (50_000_001, 1)):
        yield f"header of {size[0]} × {size[1]}", png(*size, rows=b"")
    yield "one long row", png(40_000_000, 1, rows=bytes(1000))
    yield "a chunk of 2 GB", png(8, 8, struct.pack(">I", 2**31 - 1) + b"tEXt")
    yield "a million chunks", png(8, 8, chunk(b"tEXt", b"a\0b") * 300_000)
    yield "colour type 7", png(8, 8, colour=7)
    yield "palette without one", png(8, 8, colour=3, rows=bytes(72))
    good = Image.effect_noise((200, 200), 50).convert("RGB")
    gif = bytearray(saved(good.quantize(8), "GIF"))
    place = gif.index(b",\0\0\0\0")
    gif[place + 5 : place + 9] = b"\xff\xff\xff\xff"
    yield "a frame larger than its screen", bytes(gif)
    yield (
        "a thousand frames",
        saved(good.quantize(8), "GIF", save_all=True, append_images=[Image.new("P", (200, 200), each % 250) for each in range(1000)]),
    )
    jpeg = saved(good, "JPEG", progressive=True)
    scan = jpeg.rindex(b"\xff\xda")
    yield "thousands of scans", jpeg[:-2] + jpeg[scan:-2] * (10_000_000 // len(jpeg[scan:])) + b"\xff\xd9"
    frame = jpeg.index(b"\xff\xc2")
    yield "a JPEG of 65535 × 65535", jpeg[: frame + 5] + b"\xff" * 4 + jpeg[frame + 9 :]
    yield "a JPEG of 7000 × 7000 with little in it", jpeg[: frame + 5] + struct.pack(">HH", 7000, 7000) + jpeg[frame + 9 :]
    yield "a JPEG without height", jpeg[: frame + 5] + b"\0\0" + jpeg[frame + 7 :]
    webp = saved(good, "WEBP")
    canvas = b"WEBPVP8X" + struct.pack("<IIHBHB", 10, 16, 9, 0, 9, 0)
    yield "a WebP that lies of its canvas", b"RIFF" + struct.pack("<I", len(canvas + webp[12:])) + canvas + webp[12:]
    # Each of 20,000 entries points to the same megabyte.
    entries = b"".join(struct.pack("<HHII", 0x9000 + number % 0x1000, 7, 2**20, 8) for number in range(20_000))
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 20_000) + entries
    yield "metadata that repeats itself", png(8, 8, chunk(b"eXIf", exif[6:] + bytes(2**20)))
    for start in (
        b"",
        b"\0",
        b"<svg/>",
        b"%PDF-1.7\n",
        b"PK\3\4",
        b"\x7fELF",
        b"GIF89a",
        b"\xff\xd8\xff",
        b"RIFF\0\0\0\0WEBP",
        b"II*\0",
        b"BM",
    ):
        yield f"begins with {start!r}", start + random.Random(1).randbytes(3000) * bool(start)


def mutations(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Good files with some bytes changed, repeated, removed, or cut off."""
    draw = random.Random(seed)
    for number in range(count):
        kind = draw.choice(["PNG", "JPEG", "WEBP", "GIF"])
        image = Image.effect_noise((draw.randrange(1, 400), draw.randrange(1, 400)), 60).convert(draw.choice(["RGB", "L", "P"]))
        options = {"lossless": draw.random() < 0.5} if kind == "WEBP" else {"progressive": draw.random() < 0.5} if kind == "JPEG" else {}
        file = bytearray(saved(image.convert("RGB") if kind in ("JPEG", "WEBP") else image, kind, **options))
        for _ in range(draw.choice([1, 2, 8, 64])):
            # Most of the harm is in headers.
            place = draw.randrange(min(len(file), draw.choice([64, 1000, len(file)])))
            match draw.randrange(4):
                case 0 | 1:
                    file[place] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
                case 2:
                    file[place:place] = file[place : place + draw.randrange(1, 200)]
                case 3:
                    del file[place : place + draw.randrange(1, 20)]
        if draw.random() < 0.3:
            del file[draw.randrange(len(file)) :]
        yield f"mutation {number} of a {kind}", bytes(file)


def send(port: int, file: bytes) -> tuple[int, dict[str, object], float]:
    text = base64.b64encode(file).decode()
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}]
    body = json.dumps({"model": "simulator", "max_tokens": 1, "messages": [{"role": "user", "content": parts}]})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began = time.monotonic()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer.get("error", {}), time.monotonic() - began


def memory(process: psutil.Process) -> int:
    return sum(int(each.memory_info().rss) for each in (process, *process.children()))


def try_files(count: int, seed: int, is_real_time: bool) -> bool:
    files = list(hostile())
    files += mutations(max(0, count - len(files)), seed)
    with serving("--engine", "simulator", "--images", "--media-processes=2", "--media-memory=256", "--stall-log=0.015") as server:
        front_end = next(iter(server.children("frontend").values()))
        # Starts the processes and threads. A machine that is busy takes long for that.
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(partial(send, server.port), [saved(Image.effect_noise((1500, 1500 + each), 50), "PNG") for each in range(8)]))
        if is_real_time:
            for thread in front_end.threads():
                os.sched_setscheduler(thread.id, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        before, most = memory(front_end), 0
        server.metric("penstock_loop_longest_stall_seconds")
        outcomes: Counter[str] = Counter()
        wrong, slowest, stall = 0, (0.0, ""), (0.0, "")
        with ThreadPoolExecutor(4) as threads:
            for first in range(0, len(files), 4):
                group = files[first : first + 4]
                for (name, _), (status, error, seconds) in zip(group, threads.map(partial(_send_to, server.port), group), strict=True):
                    outcomes[f"{status} {error.get('code', '')}".strip()] += 1
                    slowest = max(slowest, (seconds, name))
                    if status != 200 and not (
                        status == 400 and str(error.get("param")).startswith(FIELD) and FIELD in str(error.get("message"))
                    ):
                        wrong += 1
                        print(f"WRONG: {name}: {status} {error}", file=sys.stderr)
                most = max(most, memory(front_end))
                held = server.metric("penstock_loop_longest_stall_seconds")
                stall = max(stall, (held, ", ".join(name for name, _ in group)))
        lost = server.metric("penstock_image_decoders_lost_total")
        after = memory(front_end)
        stalls = [line for line in server.log if "event loop was held" in line]
    print(f"{len(files)} files: {wrong} wrong answers; {dict(outcomes)}; processes lost: {lost:g}")
    print(f"slowest: {slowest[0]:.2f} s, {slowest[1]}; longest stall: {stall[0] * 1000:.1f} ms, {stall[1]}")
    print(
        f"memory of the front end and its processes: {before / 2**20:.0f} MiB before, {most / 2**20:.0f} at most, {after / 2**20:.0f} after"
    )
    print(*stalls[:5], sep="\n")
    return not wrong and after < before + MAX_GROWTH and stall[0] < MAX_STALL_SECONDS


def _send_to(port: int, named: tuple[str, bytes]) -> tuple[int, dict[str, object], float]:
    return send(port, named[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Without any, it is an empty list, which argparse compares with the choices, too.
    parser.add_argument("parts", nargs="*", choices=["urls", "files", []])
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    help_text = "give the front end real-time priority: on a busy machine, waiting for a core looks like a stall (needs root)"
    parser.add_argument("--real-time", action="store_true", help=help_text)
    arguments = parser.parse_args()
    parts = arguments.parts or ["urls", "files"]
    passed = [asyncio.run(try_urls())] if "urls" in parts else []
    passed += [try_files(arguments.files, arguments.seed, arguments.real_time)] if "files" in parts else []
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
