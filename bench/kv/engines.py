"""KV that moves between two embedded engines over real sockets: are the answers those of one engine alone, and what does a move save?

    python bench/kv/engines.py exact [--model PATH] [--prompt-tokens 600]
    python bench/kv/engines.py session [--tokens 60000] [--over "shared memory"|TCP]

`exact`: prompts are computed on one engine and continued on another, over shared memory and TCP: greedy, sampled, four choices, with a
grammar and with logprobs. Each answer is compared with that of one engine alone, and the bytes of all blocks that were pulled.

`session`: a conversation of this length is computed on one engine, by a model with three small layers. Its next turn comes to another
engine, which pulls the KV, and to a third, which computes it. Shows the time to the first token of both. It ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.backends.embedded import EmbeddedBackend
from penstock.cluster.kv.handshake import Credentials
from penstock.cluster.kv.transport import SocketTransport
from penstock.config.engines import EngineConfig
from penstock.engine.checkpoints.checkpoint import find_default_model, open_checkpoint
from penstock.engine.engine import Engine
from penstock.engine.model import Model
from penstock.engine.shape import ModelShape
from penstock.grammar.grammar import GrammarCompiler
from penstock.kv.blocks import block_hashes
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.wire.address import TcpAddress, UnixAddress
from penstock.wire.messages import (
    Delta,
    Export,
    Fetch,
    Grammar,
    KvEvents,
    KvSource,
    ModelInfo,
    Sampling,
    Segment,
    Submit,
    TransferReport,
)

PAGE = 16
SECRET = "for this bench"
SAMPLED = Sampling(temperature=0.8, top_p=0.95)
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}, "people": {"type": "integer"}}, "required": ["city", "people"]}'


class Worker:
    """An engine in its thread, with a transport, and what it has said."""

    def __init__(self, name: str, make: Callable[[], Engine]) -> None:
        self.name = name
        self.deltas: dict[bytes, list[Delta]] = {}
        self.ended: dict[bytes, object] = {}
        self.reports: list[TransferReport] = []
        self._news = asyncio.Event()
        self._engine: Engine | None = None
        self._make = make
        self.backend = EmbeddedBackend(ModelInfo(name, "embedded", "none", 0, 0, PAGE), self._load, lambda: sys.exit("an engine failed"))

    def _load(self) -> Engine:
        self._engine = self._make()
        return self._engine

    async def start(self, kind: str, directory: str) -> None:
        await self.backend.start(self._take)
        assert self.backend.kv is not None
        address = UnixAddress(f"{directory}/{self.name}.kv") if kind == "shared memory" else TcpAddress("127.0.0.1", 0)
        self.transport = SocketTransport(self.backend.kv, Credentials(self.name, SECRET), address)
        self.address = str(self.transport.start())
        self.backend.kv.connect(self.transport)

    async def close(self) -> None:
        await asyncio.to_thread(self.transport.close)
        await self.backend.close()
        assert self._engine is not None
        self._engine.check_integrity()

    def _take(self, segments: Sequence[Segment], _: KvEvents | None, reports: Sequence[TransferReport] = ()) -> None:
        self.reports += reports
        for segment in segments:
            if segment.delta is not None:
                self.deltas.setdefault(segment.id, []).append(segment.delta)
            if segment.terminal is not None:
                self.ended[segment.id] = segment.terminal
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def answer(self, request: Submit) -> list[Delta]:
        self.backend.submit(request)
        await self.until(lambda: request.id in self.ended)
        return self.deltas[request.id]

    async def page_bytes(self, names: Sequence[bytes]) -> list[bytes]:
        """The KV of these blocks."""
        found: list[bytes] = []
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def read(engine: Engine) -> None:
            assert engine.memory is not None
            found.extend(b"".join(engine.memory.views(page)) for page in engine.pages_of(names))
            loop.call_soon_threadsafe(done.set)

        self.backend.ask(read)
        await done.wait()
        return found


async def started(kind: str, directory: str, makes: Sequence[Callable[[], Engine]]) -> list[Worker]:
    workers = [Worker(f"{kind.replace(' ', '-')}-{number}", make) for number, make in enumerate(makes)]
    for worker in workers:
        await worker.start(kind, directory)
    return workers


async def disaggregated(p: Worker, d: Worker, request: Submit, transfer: bytes) -> list[Delta]:
    """What a front end does: the first token from `p`, the rest from `d`, which pulls meanwhile."""
    source = KvSource(transfer, p.address, waits=True)
    d.backend.fetch(Fetch(source, request.token_ids, 10.0))
    first = await p.answer(msgspec.structs.replace(request, max_tokens=1, export=Export(transfer, 10.0)))
    known = [token for delta in first for token in delta.token_ids]
    rest = await d.answer(msgspec.structs.replace(request, token_ids=(*request.token_ids, *known), offset=1, source=source))
    for worker in (p, d):
        worker.backend.end_transfer(transfer)
    return [*first, *rest]


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def logprobs_of(deltas: Sequence[Delta]) -> list[float]:
    return [logprob.logprob for delta in deltas for logprob in delta.logprobs or ()]


def requests_of() -> dict[str, list[dict[str, Any]]]:
    """By kind: the fields of each generation."""
    greedy: dict[str, Any] = {"sampling": Sampling(temperature=0), "seed": 0}
    return {
        "greedy": [greedy],
        "sampled": [{"sampling": SAMPLED, "seed": 5}],
        "4 choices": [{"sampling": SAMPLED, "seed": seed} for seed in range(4)],
        "grammar": [{"sampling": SAMPLED, "seed": 1, "grammar": Grammar("json_schema", SCHEMA)}],
        "logprobs": [{**greedy, "logprobs": 5}],
        "prompt logprobs": [{**greedy, "logprobs": 1, "prompt_logprobs": True}],
    }


async def exact(path: Path, prompt_tokens: int) -> bool:
    checkpoint = open_checkpoint(path)
    tokenizer = pack_tokenizer(path).load()
    model = Model(checkpoint.shape, checkpoint.tensors(), checkpoint.shape.trained_length, torch.float32, torch.device("cpu"))
    size, ends = min(tokenizer.vocab_size, checkpoint.shape.vocab_size), checkpoint.end_ids | {tokenizer.end_id}
    assert tokenizer.definition is not None
    compiler = GrammarCompiler(tokenizer.definition, size, ends)

    def make() -> Engine:
        return Engine(EngineConfig(context_length=2048, kv_pages=1024), model, ends, size, compiler, time.monotonic)

    text = "A mill stands at the river. " * 400
    is_exact = True
    for kind in ("shared memory", "TCP"):
        with tempfile.TemporaryDirectory() as directory:
            p, d, alone = await started(kind, directory, [make, make, make])
            number = 0
            for what, all_fields in requests_of().items():
                for fields in all_fields:
                    number += 1
                    # Each its own prompt, so that nothing is cached.
                    prompt = tokenizer.encode(f"{number} {what}: {text}")[:prompt_tokens]
                    request = Submit(number.to_bytes(16), tuple(prompt), 32, ignore_eos=True, **fields)
                    pulled = d.transport.bytes_pulled
                    made = await disaggregated(p, d, request, number.to_bytes(16))
                    expected = await alone.answer(request)
                    names = block_hashes(prompt, PAGE)
                    is_same = tokens_of(made) == tokens_of(expected)
                    ours, theirs = await d.page_bytes(names), await p.page_bytes(names)
                    far = max((abs(a - b) for a, b in zip(logprobs_of(made), logprobs_of(expected), strict=True)), default=0.0)
                    is_exact &= is_same and ours == theirs and len(ours) == len(names) and far < 1e-3
                    moved = (d.transport.bytes_pulled - pulled) / 1e6
                    words = f"tokens {equal(is_same)}, {len(ours)} blocks {equal(ours == theirs)}, {moved:.1f} MB pulled"
                    print(f"{kind:>13}  {what:<16} {words}, logprobs within {far:.1e}")
            for worker in (p, d, alone):
                await worker.close()
    return is_exact


def small_model(context: int) -> Model:
    """Random weights: time matters here, not what it says."""
    shape = ModelShape(64, 3, 4, 2, 16, 128, 300, context, tied_embeddings=True)
    numbers = torch.Generator().manual_seed(1)

    def weights() -> Any:
        def made(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=numbers) * 0.2

        yield "model.embed_tokens.weight", made(300, 64)
        yield "model.norm.weight", torch.ones(64)
        for layer in range(3):
            prefix = f"model.layers.{layer}."
            for name, rows, columns in (("q", 64, 64), ("k", 32, 64), ("v", 32, 64), ("o", 64, 64)):
                yield f"{prefix}self_attn.{name}_proj.weight", made(rows, columns)
            for name, rows, columns in (("gate", 128, 64), ("up", 128, 64), ("down", 64, 128)):
                yield f"{prefix}mlp.{name}_proj.weight", made(rows, columns)
            for name in ("input", "post_attention"):
                yield f"{prefix}{name}_layernorm.weight", torch.ones(64)

    return Model(shape, weights(), context, torch.float32, torch.device("cpu"))


async def session(tokens: int, kind: str) -> bool:
    model = small_model(2 * tokens)

    def make() -> Engine:
        config = EngineConfig(context_length=2 * tokens, kv_pages=tokens // PAGE * 2)
        return Engine(config, model, frozenset(), 300, None, time.monotonic)

    conversation = [random.Random(1).randrange(300) for _ in range(tokens)]
    fields: dict[str, Any] = {"seed": 0, "sampling": Sampling(temperature=0)}
    with tempfile.TemporaryDirectory() as directory:
        first, second, third = await started(kind, directory, [make, make, make])
        said = tokens_of(await first.answer(Submit((1).to_bytes(16), tuple(conversation), 16, **fields)))
        turn = (*conversation, *said, *[7] * 200)
        began = time.perf_counter()
        moved = await second.answer(Submit((2).to_bytes(16), turn, 1, source=KvSource((9).to_bytes(16), first.address), **fields))
        pulled = time.perf_counter() - began
        began = time.perf_counter()
        computed = await third.answer(Submit((3).to_bytes(16), turn, 1, **fields))
        alone = time.perf_counter() - began
        (report,) = second.reports
        print(f"over {kind}: {len(turn):,} tokens, {report.blocks:,} blocks, {report.size / 1e6:.0f} MB in {report.seconds:.2f} s")
        print(f"first token after {pulled:.2f} s with the KV moved, {alone:.2f} s computed: {pulled / alone:.3f}")
        print(f"tokens {equal(tokens_of(moved) == tokens_of(computed))}")
        for worker in (first, second, third):
            await worker.close()
    return pulled <= 0.2 * alone and tokens_of(moved) == tokens_of(computed)


def equal(is_equal: bool) -> str:
    return "equal" if is_equal else "DIFFER"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("exact", "session"))
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--over", choices=("shared memory", "TCP"), default="shared memory")
    chosen = parser.parse_args()
    if chosen.what == "exact":
        is_good = asyncio.run(exact(chosen.model or find_default_model(), chosen.prompt_tokens))
    else:
        is_good = asyncio.run(session(chosen.tokens, chosen.over))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
