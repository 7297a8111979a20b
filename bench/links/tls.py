"""What TLS on a link costs: the CPU of both ends per token, by turns with a plain link.

    python bench/links/tls.py

A worker process with the simulator and a front end's link in this process, over TCP on this machine: 1,000 generations at once.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import uvloop

from penstock.cluster.links.security import LinkTls
from penstock.cluster.links.worker_link import Generation, WorkerLink, connect
from penstock.config.commands import LinkTlsSettings
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.address import TcpAddress
from penstock.wire.errors import LinkBroken, PenstockError
from penstock.wire.messages import Submit

ROUNDS = 5
GENERATIONS, TOKENS, STEP_MS = 1000, 400, 5
SECRET = "only for this measurement"
CERTIFICATES = Path(__file__).parents[2] / "tests" / "certificates"


class Counted(Generation):
    def __init__(self, done: asyncio.Future[None], left: list[int]) -> None:
        super().__init__(Mailbox(Doorbell()))
        self._done, self._left = done, left

    def ended(self, error: PenstockError | None) -> None:
        assert error is None, error
        self._left[0] -= 1
        if not self._left[0]:
            self._done.set_result(None)


def files(name: str) -> LinkTlsSettings:
    return LinkTlsSettings(CERTIFICATES / f"{name}.pem", CERTIFICATES / f"{name}.pem", CERTIFICATES / "ca.pem")


async def linked(address: TcpAddress, tls: LinkTls | None) -> WorkerLink:
    while True:
        try:
            return (await connect(address, "bench", SECRET, tls))[0]
        except LinkBroken:
            await asyncio.sleep(0.05)


async def generate(link: WorkerLink) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = [GENERATIONS]
    for number in range(GENERATIONS):
        prompt = tuple(range(300, 340))
        link.submit(Submit(number.to_bytes(16), prompt, TOKENS, seed=number, ignore_eos=True), Counted(done, left))
    await done


def measure(with_tls: bool) -> tuple[float, float, float]:
    """CPU-µs per token of the worker and of the front end's link, and seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = TcpAddress("127.0.0.1", listener.getsockname()[1])
    flags = [f"--link-tls-{name}={path}" for name, path in vars(files("worker")).items()] if with_tls else []
    command = [sys.executable, "-m", "penstock", "worker", "--engine=simulator", f"--step-ms={STEP_MS}", f"--max-batch={GENERATIONS}"]
    environment = {**psutil.Process().environ(), "PENSTOCK_LINK_SECRET": SECRET}
    worker = subprocess.Popen([*command, f"--listen={address}", *flags], stderr=subprocess.DEVNULL, env=environment)
    try:
        return uvloop.run(run(address, LinkTls.load(files("front_end"), "frontend") if with_tls else None, psutil.Process(worker.pid)))
    finally:
        worker.kill()
        worker.wait()


async def run(address: TcpAddress, tls: LinkTls | None, worker: psutil.Process) -> tuple[float, float, float]:
    link = await linked(address, tls)
    before, own, began = sum(worker.cpu_times()[:2]), time.process_time(), time.perf_counter()
    await generate(link)
    seconds, tokens = time.perf_counter() - began, GENERATIONS * TOKENS
    used = sum(worker.cpu_times()[:2]) - before, time.process_time() - own
    link.abort()
    await link.lost
    return used[0] / tokens * 1e6, used[1] / tokens * 1e6, seconds


def main() -> None:
    found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    measure(False)
    for number in range(ROUNDS):
        for with_tls in (False, True) if number % 2 else (True, False):
            figures = measure(with_tls)
            found[with_tls].append(figures)
            print(
                f"{'TLS  ' if with_tls else 'plain'}  worker {figures[0]:.2f}  front end {figures[1]:.2f} CPU-µs/token  {figures[2]:.2f} s",
                flush=True,
            )
    for place, name in enumerate(("worker", "front end", "seconds")):
        plain, secured = (statistics.median(figures[place] for figures in found[kind]) for kind in (False, True))
        print(f"{name}: plain {plain:.2f}, TLS {secured:.2f}, ratio {secured / plain:.2f}")


if __name__ == "__main__":
    main()
