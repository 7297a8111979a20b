"""A front end gets a worker's tokenizer: from its own files, from its cache, or over the link, checked. Real sockets, two "machines"."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import pytest

from penstock.api.models import Models
from penstock.cluster.links.security import Handshake
from penstock.cluster.links.worker_link import connect
from penstock.cluster.pool import WorkerPool
from penstock.text.tokenizers.cache import TokenizerCache
from penstock.text.tokenizers.source import PackedTokenizer, fingerprint, pack_tokenizer
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt
from penstock.wire.address import UnixAddress
from penstock.wire.codec import FrameReader, encode_frame
from penstock.wire.errors import ConfigError, FrameMalformed, LinkBroken, LinkError
from penstock.wire.messages import (
    MAX_TOKENIZER_BYTES,
    PROTOCOL_VERSION,
    TOKENIZER_PIECE_BYTES,
    Challenge,
    Hello,
    Message,
    TokenizerPiece,
    TokenizerRequest,
    Welcome,
)
from tokenizer_kinds import CHAT_ML, byte_level, encode_chat
from workers import SECRET, Worker, expected, make_model, submit, until
from workers import FrontEnd as Dispatching

PROMPT = ChatPrompt([ChatMessage(role="user", content="the water flows")])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory whose tokenizer takes several pieces on the link."""
    directory = tmp_path_factory.mktemp("worker machine") / "model"
    directory.mkdir()
    byte_level(["<|im_start|>", "<|im_end|>"]).save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT_ML, "padding": "x" * 100}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "additional_chat_templates").mkdir()
    long = (
        "{# " + "long " * TOKENIZER_PIECE_BYTES + "#}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    (directory / "additional_chat_templates" / "long.jinja").write_text(long)
    return directory


class Machine:
    """The front end's side: its models and its links, with a directory of its own."""

    def __init__(self, cache: Path | None, *addresses: UnixAddress, model: Path | None = None) -> None:
        self.models = Models(cache=TokenizerCache(cache, model))
        self.pool = WorkerPool(addresses, "test", SECRET, self.models.prepare)
        self.pool.listeners.append(self.models)

    async def __aenter__(self) -> Self:
        await self.pool.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.__aexit__()

    async def until_ready(self) -> None:
        async with asyncio.timeout(20):
            await self.pool.wait_ready()


def worker_with(folder: Path, packed: PackedTokenizer, sent: bytes | None = None) -> Worker:
    """A real worker that announces this tokenizer; `sent` is what it sends instead of it."""
    worker = Worker(folder, "a", make_model(tokenizer=packed.fingerprint))
    worker.server.tokenizer = packed.data if sent is None else sent
    return worker


async def test_the_tokenizer_comes_over_the_link_and_is_cached(tmp_path: Path, model: Path) -> None:
    packed = pack_tokenizer(model)
    assert len(packed.data) > 3 * TOKENIZER_PIECE_BYTES
    cache = tmp_path / "cache"
    async with worker_with(tmp_path, packed) as worker:
        async with Machine(cache, worker.address) as machine:
            await machine.until_ready()
            served = machine.models.find("simulator")
            assert encode_chat(served.tokenizer, PROMPT) == encode_chat(packed.load(), PROMPT)
            assert served.tokenizer.render_chat(ChatPrompt(PROMPT.messages, template="long")) == "user: the water flows\n"
        assert [file.name for file in cache.iterdir()] == [packed.fingerprint]
        assert (cache / packed.fingerprint).read_bytes() == packed.data
        # The next front end has it.
        worker.server.tokenizer = b""
        async with Machine(cache, worker.address) as machine:
            await machine.until_ready()


async def test_a_model_directory_of_the_front_end_is_used_where_it_fits(tmp_path: Path, model: Path) -> None:
    packed = pack_tokenizer(model)
    own = tmp_path / "another place"
    shutil.copytree(model, own)
    async with worker_with(tmp_path, packed, sent=b"") as worker, Machine(None, worker.address, model=own) as machine:
        await machine.until_ready()
        assert encode_chat(machine.models.find("simulator").tokenizer, PROMPT) == encode_chat(packed.load(), PROMPT)


@pytest.mark.parametrize("damage", ["half-written", "another template", "missing"])
async def test_a_model_directory_that_does_not_fit_is_not_used(tmp_path: Path, model: Path, damage: str) -> None:
    packed = pack_tokenizer(model)
    own = tmp_path / "another place"
    shutil.copytree(model, own)
    match damage:
        case "half-written":
            text = (own / "tokenizer.json").read_text()
            (own / "tokenizer.json").write_text(text[: len(text) // 2])
        case "another template":
            (own / "chat_template.jinja").write_text("another")
        case _:
            shutil.rmtree(own)
    async with worker_with(tmp_path, packed) as worker, Machine(None, worker.address, model=own) as machine:
        await machine.until_ready()
        assert machine.models.find("simulator").tokenizer.render_chat(PROMPT) == packed.load().render_chat(PROMPT)


async def test_a_damaged_cache_is_replaced_and_an_unwritable_one_is_no_obstacle(tmp_path: Path, model: Path) -> None:
    packed = pack_tokenizer(model)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / packed.fingerprint).write_bytes(packed.data[:-1])
    file = tmp_path / "file"
    file.write_text("")
    async with worker_with(tmp_path, packed) as worker:
        for directory in (cache, file / "below a file"):
            async with Machine(directory, worker.address) as machine:
                await machine.until_ready()
    assert (cache / packed.fingerprint).read_bytes() == packed.data


async def test_what_does_not_match_the_fingerprint_is_not_used(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed = pack_tokenizer(model)
    tampered = packed.data.replace(b"im_start", b"im_stray")
    cache = tmp_path / "cache"
    async with worker_with(tmp_path, packed, sent=tampered) as worker, Machine(cache, worker.address) as machine:
        await until(lambda: "cannot be used" in caplog.text)
        assert f"the worker sent a tokenizer with the fingerprint {fingerprint(tampered)}" in caplog.text
        assert machine.pool.members == []
        assert not cache.exists()
        worker.server.tokenizer = packed.data
        await machine.until_ready()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", "F" * 64, "a" * 63, "a" * 64 + "\n", "a\0b"])
async def test_only_a_fingerprint_is_looked_for(tmp_path: Path, name: str) -> None:
    async def fetch() -> bytes:
        raise AssertionError

    with pytest.raises(ConfigError, match="expected 'words' or a fingerprint of 64 hexadecimal digits"):
        await TokenizerCache(tmp_path).load(name, fetch)


async def test_bytes_that_are_no_tokenizer_are_refused_by_name(tmp_path: Path) -> None:
    for data in (b"\xc1", b"garbage", b"\x94\xa1{\x80\x80\x00", b"\x93\xa1\xff\x80\x80"):

        async def fetch(data: bytes = data) -> bytes:
            return data

        with pytest.raises(ConfigError, match=r"cannot be (unpacked|read)"):
            await TokenizerCache(tmp_path / "cache").load(fingerprint(data), fetch)
    assert not (tmp_path / "cache").exists()


async def test_tokens_stream_while_the_tokenizer_is_fetched(tmp_path: Path, model: Path) -> None:
    packed = pack_tokenizer(model)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(worker_with(tmp_path, packed))
        front_end = await stack.enter_async_context(Dispatching([worker]))
        readers = [front_end.start(submit(number, 300)) for number in range(8)]
        (member,) = front_end.pool.members
        await until(lambda: all(reader.tokens for reader, _ in readers))
        fetched = 0
        while not all(task.done() for _, task in readers):
            assert await member.link.fetch_tokenizer() == packed.data
            fetched += 1
        assert fetched > 1, "both happened at the same time"
        for number, (reader, task) in enumerate(readers):
            await task
            assert reader.tokens == expected(number, 300)


Answer = Callable[[asyncio.StreamWriter, int], Awaitable[None]]


@asynccontextmanager
async def worker_by_hand(folder: Path, answer: Answer) -> AsyncIterator[UnixAddress]:
    """A worker that shakes hands, and answers requests for its tokenizer as the test likes."""
    address = UnixAddress(str(folder / "by hand.sock"))
    connections: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def receive(reader: asyncio.StreamReader) -> Message:
        size = await reader.readexactly(4)
        (message,) = FrameReader().feed(size + await reader.readexactly(int.from_bytes(size)))
        return message

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[asyncio.current_task()] = writer
        writer.write(encode_frame(Challenge(PROTOCOL_VERSION, b"n" * 32)))
        try:
            hello = await receive(reader)
            assert isinstance(hello, Hello)
            proof = Handshake.of(b"n" * 32, hello).proof(SECRET, "worker", "by hand")
            writer.write(encode_frame(Welcome("by hand", proof, make_model(tokenizer="f" * 64))))
            while True:
                request = await receive(reader)
                if isinstance(request, TokenizerRequest):
                    await answer(writer, request.offset)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    async with await asyncio.start_unix_server(serve, address.path):
        try:
            yield address
        finally:
            for writer in connections.values():
                writer.close()
            await asyncio.gather(*(task for task in connections if task is not None))


def say(writer: asyncio.StreamWriter, *pieces: TokenizerPiece) -> None:
    writer.write(b"".join(encode_frame(piece) for piece in pieces))


async def cut(writer: asyncio.StreamWriter, offset: int) -> None:
    if offset:
        writer.transport.abort()
    else:
        say(writer, TokenizerPiece(0, 2 * TOKENIZER_PIECE_BYTES, b"x" * TOKENIZER_PIECE_BYTES))


async def too_large(writer: asyncio.StreamWriter, _: int) -> None:
    say(writer, TokenizerPiece(0, MAX_TOKENIZER_BYTES + 1, b"x"))


async def empty(writer: asyncio.StreamWriter, _: int) -> None:
    say(writer, TokenizerPiece(0, 0, b""))


async def large_piece(writer: asyncio.StreamWriter, _: int) -> None:
    say(writer, TokenizerPiece(0, MAX_TOKENIZER_BYTES, b"x" * (TOKENIZER_PIECE_BYTES + 1)))


async def more_than_announced(writer: asyncio.StreamWriter, _: int) -> None:
    say(writer, TokenizerPiece(0, 10, b"x" * 11))


async def no_progress(writer: asyncio.StreamWriter, offset: int) -> None:
    say(writer, TokenizerPiece(offset, 10, b""))


async def another_place(writer: asyncio.StreamWriter, offset: int) -> None:
    say(writer, TokenizerPiece(offset + 1, 10, b"x"))


async def bit_by_bit(writer: asyncio.StreamWriter, offset: int) -> None:
    say(writer, TokenizerPiece(offset, MAX_TOKENIZER_BYTES, b"x"))


async def ever_longer(writer: asyncio.StreamWriter, offset: int) -> None:
    say(writer, TokenizerPiece(offset, offset + 2 * TOKENIZER_PIECE_BYTES, b"x" * TOKENIZER_PIECE_BYTES))


async def unasked(writer: asyncio.StreamWriter, offset: int) -> None:
    say(writer, *(TokenizerPiece(offset, 10, b"x") for _ in range(3)))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (cut, LinkBroken),
        (too_large, FrameMalformed),
        (empty, FrameMalformed),
        (large_piece, FrameMalformed),
        (more_than_announced, FrameMalformed),
        (no_progress, FrameMalformed),
        (another_place, FrameMalformed),
        (bit_by_bit, FrameMalformed),
        (ever_longer, FrameMalformed),
        (unasked, FrameMalformed),
    ],
    ids=lambda value: value.__name__,
)
async def test_a_worker_that_sends_something_else_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: Answer, error: type[LinkError]
) -> None:
    offsets: list[int] = []

    async def noted(writer: asyncio.StreamWriter, offset: int) -> None:
        offsets.append(offset)
        await answer(writer, offset)

    async with worker_by_hand(tmp_path, noted) as address:
        link, _ = await connect(address, "test", SECRET)
        async with asyncio.timeout(10):
            with pytest.raises(error):
                await link.fetch_tokenizer()
        assert len(offsets) <= 2, "a lie is noticed at once"
        link.abort()
        await link.lost
        async with Machine(tmp_path / "cache", address) as machine:
            await until(lambda: "by hand cannot be used" in caplog.text)
            assert machine.pool.members == []
    assert not (tmp_path / "cache").exists()


async def test_a_worker_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    async def silence(writer: asyncio.StreamWriter, offset: int) -> None:
        """Answers nothing."""

    async with worker_by_hand(tmp_path, silence) as address:
        link, _ = await connect(address, "test", SECRET)
        async with asyncio.timeout(10):
            with pytest.raises(LinkBroken, match="the worker sent no piece of its tokenizer within 0"):
                await link.fetch_tokenizer(0.01)
        link.abort()
        await link.lost


async def test_many_workers_at_once_bring_a_tokenizer_that_is_read_once(tmp_path: Path, model: Path) -> None:
    packed = pack_tokenizer(model)
    cache = TokenizerCache(tmp_path / "cache")
    all_fetch = asyncio.Barrier(8)

    async def fetch() -> bytes:
        await all_fetch.wait()
        return packed.data

    async with asyncio.timeout(20):
        found = await asyncio.gather(*[cache.load(packed.fingerprint, fetch) for _ in range(8)])
    assert len(set(map(id, found))) == 1
    assert await cache.load(packed.fingerprint) is found[0]


async def test_only_a_file_of_a_possible_size_is_read_from_the_cache(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ("f" * 64))
    assert TokenizerCache(tmp_path).find("f" * 64) is None
    data = bytes(MAX_TOKENIZER_BYTES + 1)
    (tmp_path / fingerprint(data)).write_bytes(data)
    assert TokenizerCache(tmp_path).find(fingerprint(data)) is None


async def test_a_front_end_that_asks_and_does_not_read_loses_its_link(tmp_path: Path, model: Path) -> None:
    """Else the pieces would fill the worker's memory."""
    async with worker_with(tmp_path, pack_tokenizer(model)) as worker:
        link, _ = await connect(worker.address, "test", SECRET)
        (port,) = worker.server.links
        with pytest.raises(FrameMalformed, match="asks for more of the tokenizer than it reads"):
            port.messages_received([TokenizerRequest(0)] * 1000)
        link.abort()


async def test_a_request_beyond_the_tokenizer_closes_the_link_by_name(tmp_path: Path) -> None:
    async with worker_with(tmp_path, PackedTokenizer("words")) as worker:
        link, _ = await connect(worker.address, "test", SECRET)
        with pytest.raises(LinkBroken, match="asked for byte 0 of a tokenizer of 0 bytes"):
            await link.fetch_tokenizer()
        await link.lost


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path, model: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert pack_tokenizer(copy) == pack_tokenizer(model)
    (copy / "README.md").write_text("not part of it")
    assert pack_tokenizer(copy) == pack_tokenizer(model)
    (copy / "additional_chat_templates" / "long.jinja").write_text("another")
    assert pack_tokenizer(copy).fingerprint != pack_tokenizer(model).fingerprint
    assert pack_tokenizer(None) == PackedTokenizer("words", b"")
    for text in (str(model), str(copy)):
        assert text.encode() not in pack_tokenizer(model).data
