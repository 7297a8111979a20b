"""How fast KV moves between two workers' processes on this machine, against a plain copy of memory and of a socket.

    python bench/kv/transport.py [--blocks 128] [--block-mib 2] [--strips 64] [--rounds 4] [--checksum engine|none] [--only TLS] [--strace]

Both ends are real transports with real slots, each in its own process. For each way: GB/s, and seconds of CPU per GB of both processes
together. `--strace` also counts system calls, which makes everything slower, so its times are not shown. It ends by itself.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from penstock.cluster.kv.handshake import Credentials
from penstock.cluster.kv.transport import SocketTransport
from penstock.cluster.links.security import LinkTls
from penstock.config.commands import LinkTlsSettings
from penstock.engine.page_memory import checksum
from penstock.kv.moving import KvTransport, SlotLayout
from penstock.wire.address import parse_address
from penstock.wire.messages import KvSource

ROOT = Path(__file__).parents[2]
PEM = ROOT / "tests/certificates/worker.pem"
TLS = LinkTlsSettings(PEM, PEM, ROOT / "tests/certificates/ca.pem")
SECRET = "for this bench"
GB = 1e9
Checksum = Callable[[Sequence[memoryview]], int]


def names_of(count: int) -> list[bytes]:
    return [blake2b(number.to_bytes(4), digest_size=16).digest() for number in range(count)]


def checksum_named(name: str) -> Checksum:
    if name == "none":
        return lambda _: 0
    return checksum


class Slots:
    """A `SlotMemory` of this size, every page of it written."""

    def __init__(self, slots: int, strip_bytes: int, strips: int, checksum: Checksum) -> None:
        self.layout = SlotLayout(slots, strip_bytes, tuple(strip * slots * strip_bytes for strip in range(strips)))
        size = slots * strip_bytes * strips
        self.file = os.memfd_create("slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, size)
        self._bytes = memoryview(mmap.mmap(self.file, size))
        for start in range(0, size, 1 << 20):
            part = self._bytes[start : start + (1 << 20)]
            part[:] = (start.to_bytes(8) * ((1 << 20) // 8))[: len(part)]
        self.checksum = checksum

    def views(self, slot: int) -> Sequence[memoryview]:
        width = self.layout.strip_bytes
        return [self._bytes[start + slot * width : start + (slot + 1) * width] for start in self.layout.starts]


class Engine:
    """A `KvEngine` that has every block, each in the slot of its place in the chain."""

    fingerprint = b"bench"

    def __init__(self, memory: Slots) -> None:
        self.memory = memory
        self.failure = ""
        self.done = threading.Event()
        self._transport: KvTransport | None = None

    def connect(self, transport: KvTransport) -> None:
        self._transport = transport

    def export(self, transfer: bytes, names: Sequence[bytes], *, waits: bool) -> None:  # noqa: ARG002 - it has every block
        assert self._transport is not None
        self._transport.exported(transfer, 0, range(len(names)), is_last=True)

    def release(self, transfer: bytes) -> None:
        pass

    def arrived(self, transfer: bytes, blocks: int) -> None:
        pass

    def pull_ended(self, transfer: bytes, failure: str) -> None:  # noqa: ARG002 - there is one at a time
        self.failure = failure
        self.done.set()


def open_transport(options: argparse.Namespace, address: str, streams: int, *, tls: bool) -> tuple[Engine, SocketTransport]:
    strip_bytes = int(options.block_mib * 2**20) // options.strips
    engine = Engine(Slots(options.blocks, strip_bytes, options.strips, checksum_named(options.checksum)))
    ends = (LinkTls.load(TLS, "source"), LinkTls.load(TLS, "puller")) if tls else (None, None)
    transport = SocketTransport(engine, Credentials("bench", SECRET, *ends), parse_address(address), streams=streams)
    engine.connect(transport)
    transport.start()
    return engine, transport


def serve(options: argparse.Namespace) -> None:
    """The source's process: until its standard input ends."""
    _, transport = open_transport(options, options.source, 1, tls=options.tls)
    print(transport.address, flush=True)
    sys.stdin.read()
    transport.close()


@contextmanager
def source_process(options: argparse.Namespace, address: str, *, tls: bool, log: Path | None) -> Iterator[tuple[int, str]]:
    flags = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in ("blocks", "block-mib", "strips", "checksum")]
    command = [sys.executable, __file__, f"--source={address}", *flags, *(["--tls"] if tls else [])]
    if log is not None:
        command = ["strace", "-f", "-c", "-o", str(log), *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().strip()
        process.stdin.close()
        process.wait()


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def show(name: str, size: float, seconds: float, cpu: float) -> None:
    print(f"| {name} | {size / seconds / GB:.2f} | {cpu / (size / GB):.2f} |", flush=True)


def move(options: argparse.Namespace, name: str, address: str, streams: int, *, tls: bool = False) -> None:
    """Pulls all blocks, again and again."""
    if options.only not in name:
        return
    log = Path(tempfile.mkstemp()[1]) if options.strace else None
    names, slots = names_of(options.blocks), list(range(options.blocks))
    with source_process(options, address, tls=tls, log=log) as (pid, place), tempfile.TemporaryDirectory() as folder:
        engine, transport = open_transport(options, f"unix:{folder}/kv" if "unix" in address else "tcp://127.0.0.1:0", streams, tls=tls)
        began, cpu = 0.0, 0.0
        for number in range(options.rounds + 1):
            if number == 1:
                # The first one opens the connections.
                began, cpu = time.perf_counter(), own_cpu() + cpu_of(pid)
            engine.done.clear()
            transport.pull(KvSource(number.to_bytes(16), place), names, slots)
            engine.done.wait()
            assert not engine.failure, engine.failure
        seconds, cpu = time.perf_counter() - began, own_cpu() + cpu_of(pid) - cpu
        transport.close()
    size = options.rounds * options.blocks * engine.memory.layout.slot_bytes
    if log is None:
        show(name, size, seconds, cpu)
    else:
        print(f"{name}: the source's system calls, for {(options.rounds + 1) / options.rounds * size / GB:.2f} GB")
        print("\n".join(log.read_text(encoding="utf-8").splitlines()[:12]))
        log.unlink()


def copy_memory(options: argparse.Namespace) -> None:
    """A plain copy of memory, block by block."""
    size, width = int(options.blocks * options.block_mib * 2**20), int(options.block_mib * 2**20)
    source, target = memoryview(mmap.mmap(-1, size)), memoryview(mmap.mmap(-1, size))
    for part in (source, target):
        for start in range(0, size, 4096):
            part[start] = 1
    began, cpu = time.perf_counter(), own_cpu()
    for _ in range(options.rounds):
        for start in range(0, size, width):
            target[start : start + width] = source[start : start + width]
    show("plain copy of memory", options.rounds * size, time.perf_counter() - began, own_cpu() - cpu)


def copy_socket(options: argparse.Namespace, family: socket.AddressFamily) -> None:
    """The same bytes through one plain socket, from a forked process, a block per call."""
    size, width = int(options.blocks * options.block_mib * 2**20), int(options.block_mib * 2**20)
    if family == socket.AF_UNIX:
        here, there = socket.socketpair()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
        listener.close()
    source = memoryview(mmap.mmap(-1, size))
    for start in range(0, size, 4096):
        source[start] = 1
    pid = os.fork()
    if pid == 0:
        there.recv(1)
        for _ in range(options.rounds):
            for start in range(0, size, width):
                there.sendall(source[start : start + width])
        there.recv(1)
        os._exit(0)
    target = memoryview(mmap.mmap(-1, size))
    for start in range(0, size, 4096):
        target[start] = 1
    began, cpu = time.perf_counter(), own_cpu() + cpu_of(pid)
    here.send(b"1")
    for _ in range(options.rounds):
        got = 0
        while got < size:
            got += here.recv_into(target[got : got + width])
    show(f"plain {family.name} socket", options.rounds * size, time.perf_counter() - began, own_cpu() + cpu_of(pid) - cpu)
    here.send(b"1")
    os.waitpid(pid, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--block-mib", type=float, default=2.0)
    parser.add_argument("--strips", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--checksum", choices=("engine", "none"), default="engine")
    parser.add_argument("--only", default="", help="ways with this in their name")
    parser.add_argument("--strace", action="store_true")
    parser.add_argument("--source", help=argparse.SUPPRESS)
    parser.add_argument("--tls", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.source:
        serve(options)
        return
    print("| way | GB/s | CPU s per GB |\n|---|---|---|")
    if not options.strace and not options.only:
        copy_memory(options)
        copy_socket(options, socket.AF_UNIX)
        copy_socket(options, socket.AF_INET)
    with tempfile.TemporaryDirectory() as folder:
        move(options, "shared memory", f"unix:{folder}/source.kv", 1)
    for streams in (1, 4):
        move(options, f"TCP, streams: {streams}", "tcp://127.0.0.1:0", streams)
    for streams in (1, 4):
        move(options, f"TLS, streams: {streams}", "tcp://127.0.0.1:0", streams, tls=True)


if __name__ == "__main__":
    main()
