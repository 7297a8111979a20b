"""Images on their way from the three APIs into a plan, and what a model that reads only text gets instead."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest

from front_end import MODEL, WORDS, FrontEnd, Turns, request, says
from penstock.api.anthropic.messages import count_message_tokens, parse_messages
from penstock.api.openai.chat import parse_chat
from penstock.api.pipeline.images import FEW_NOTES, Images
from penstock.api.pipeline.plan import Plan
from penstock.api.pipeline.request import Incoming, PromptContext
from penstock.api.responses.parse import MAX_FETCHED_BYTES, ResponseParser
from penstock.api.responses.store import SqliteStore
from penstock.media.families import simulator
from penstock.media.picture import ImageRef, Picture
from penstock.stream.mailbox import Mailbox
from penstock.text.images import image_mark
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt
from penstock.wire.errors import GenerationFault, RequestError
from penstock.wire.images import FIRST_IMAGE_ID, ImageRules, wrong_images
from penstock.wire.messages import Fault, ModelInfo, Submit
from simulated_pictures import sealed_name
from sqlite_file import sql

SEEING = msgspec.structs.replace(MODEL, name="seeing", images=simulator.make_rules())
SIZE = (64, 32)
POSITIONS = 8


class Reader:
    """Every image is a picture of one size, named after what was sent. Notes what it was asked for."""

    def __init__(self) -> None:
        self.read_refs: list[ImageRef] = []
        self.fetched: list[str] = []
        self.refused = ""
        self.file = "Zm9v"
        self.noticed: Callable[[], object] = list
        self.max_images = 1000

    def check_number(self, refs: Sequence[ImageRef]) -> None:
        if len(refs) > self.max_images:
            raise RequestError(f"`{refs[-1].field}` is one of {len(refs)} images", param=refs[-1].field, code="too_many_images")

    async def read(self, refs: Sequence[ImageRef], lane: str, root: bytes, rules: ImageRules, weight: float) -> list[Picture]:
        self.read_refs += refs
        self.noticed()
        return [self._picture(ref, root, rules) for ref in refs]

    async def fetch(self, refs: Sequence[ImageRef], lane: str, weight: float, check: Callable[[int], None]) -> dict[str, str]:
        wanted = {ref.url: self.file for ref in refs if ref.url.startswith("http")}
        self.check_number(refs)
        self.fetched += wanted
        check(sum(len(file) // 4 * 3 for file in wanted.values()))
        return wanted

    def _picture(self, ref: ImageRef, root: bytes, rules: ImageRules) -> Picture:
        content = ref.url or ref.data
        if self.refused and self.refused in content:
            raise RequestError(f"`{ref.field}` cannot be read: it is broken", param=ref.field, code="invalid_image")
        pixels = b"\0" * (3 * SIZE[0] * SIZE[1])
        layout = simulator.layout(rules, sealed_name(blake2b(content.encode(), key=root[:64]).digest(), SIZE, pixels), SIZE)
        return Picture(layout, layout.size, pixels)


async def asked(body: dict[str, Any], model: ModelInfo = SEEING, drops: bool = False) -> tuple[Incoming, PromptContext, Reader]:
    incoming, context = await request({"model": model.name, **body}, model)
    reader = Reader()
    return incoming, PromptContext(context.models, context.transcripts, reader, drops), reader


async def planned(*messages: Any, model: ModelInfo = SEEING, drops: bool = False, **fields: Any) -> Plan:
    incoming, context, _ = await asked({"messages": messages, **fields}, model, drops)
    return (await parse_chat(incoming, context))[0]


def image(url: str = "data:a", **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]}


def png(width: int, height: int) -> bytes:
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))


def said(plan: Plan) -> str:
    return WORDS.decode([each for each in plan.submits[0].token_ids if each < FIRST_IMAGE_ID])


async def test_every_choice_has_the_images_and_the_plan_holds_the_pictures() -> None:
    plan = await planned(user("see ", image("data:a"), " and ", image("data:b"), image("data:a")), n=3)
    assert len(plan.submits) == 3
    for submit in plan.submits:
        assert wrong_images(submit.token_ids, submit.images) is None
        assert [span.name for span in submit.images] == [plan.pictures[0].name, plan.pictures[1].name, plan.pictures[0].name]
    assert sum(each >= FIRST_IMAGE_ID for each in plan.submits[0].token_ids) == 3 * POSITIONS
    assert plan.prompt_tokens == len(plan.submits[0].token_ids)
    # Nothing else holds what the client sent, however long the answer takes.
    assert "data:" not in str(plan.request)


async def test_what_the_reader_is_asked_for() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        user(image("https://example.com/a.png", detail="high"), "?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": "data:b", "detail": "low"}]},
        user({"type": "input_image", "image_url": "data:c"}),
    ]
    incoming, context, reader = await asked({"messages": messages})
    await parse_chat(incoming, context)
    assert reader.read_refs == [
        ImageRef("messages[0].content[0]", "https://example.com/a.png", detail="high", is_old=True),
        ImageRef("messages[2].content[0]", "data:b", detail="low", is_old=True),
        ImageRef("messages[3].content[0]", "data:c"),
    ]


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 0}, {"tool_choice": "required"}, {"messages": [user(image(), "x" * 200_000)]}, {"model": "none"}]
)
async def test_nothing_is_read_of_a_request_that_is_refused_anyway(fields: dict[str, Any]) -> None:
    incoming, context, reader = await asked({"messages": [user(image())], **fields})
    with pytest.raises(RequestError):
        await parse_chat(incoming, context)
    assert not reader.read_refs


async def test_names_depend_on_the_salt() -> None:
    plain, salted = await planned(user(image())), await planned(user(image()), cache_salt="mine")
    assert plain.pictures[0].name != salted.pictures[0].name
    assert plain.submits[0].root != salted.submits[0].root


async def test_shown_ids_are_those_of_the_vocabulary() -> None:
    front_end = FrontEnd(says("ok"), path="/v1/chat/completions", images=SEEING.images, media=Reader())
    await front_end.post(messages=[user("a", image(), "b")], return_token_ids=True)
    ids = front_end.json["prompt_token_ids"]
    assert front_end.json["choices"][0]["prompt_token_ids"] == ids
    assert len(ids) == front_end.json["usage"]["prompt_tokens"]
    assert max(ids) < WORDS.vocab_size
    await front_end.send("POST", "/tokenize", json.dumps({"messages": [user("a", image(), "b")], "return_token_strs": True}).encode())
    assert front_end.json["tokens"] == ids
    assert len(front_end.json["token_strs"]) == len(ids)
    await front_end.send("POST", "/detokenize", json.dumps({"tokens": [FIRST_IMAGE_ID]}).encode())
    assert (front_end.status, front_end.json["error"]["param"]) == (400, "tokens[0]")
    front_end.path = "/v1/completions"
    await front_end.send("POST", "/v1/completions", json.dumps({"model": "m", "prompt": [FIRST_IMAGE_ID]}).encode())
    assert (front_end.status, front_end.json["error"]["param"]) == (400, "prompt[0]")


@pytest.mark.parametrize("model", [SEEING, MODEL])
async def test_marks_for_the_cache_are_where_they_were(model: ModelInfo) -> None:
    """Behind an image, on it, and before one. A note is longer than the mark that it replaces."""
    marked = {"cache_control": {"type": "ephemeral"}}

    async def tokens(*parts: Any) -> tuple[int, Plan]:
        plan = await planned(user(*parts), model=model, drops=True, max_tokens=1)
        [mark] = plan.submits[0].marks
        return mark.tokens, plan

    before, _ = await tokens({"type": "text", "text": "one two", **marked}, image(), " three four five")
    on, plan = await tokens("one two", {**image(), **marked}, " three four five")
    behind, whole = await tokens("one two", image(), {"type": "text", "text": " three four", **marked}, " five")
    size = POSITIONS if model is SEEING else len(WORDS.encode("[image left out: this model reads only text]"))
    assert on - before == size
    assert behind - on == len(WORDS.encode(" three four"))
    assert whole.prompt_tokens == plan.prompt_tokens > behind


async def test_a_model_that_reads_only_text_names_those_that_read_images() -> None:
    incoming, context, reader = await asked({"messages": [user("a", image())]}, MODEL)
    context.models.live.append(SEEING)
    with pytest.raises(RequestError, match="images are not supported by this model, `m`; these models read images: `seeing`") as refused:
        await parse_chat(incoming, context)
    assert (refused.value.param, refused.value.code) == ("messages[0].content[1]", "unsupported_image")
    assert not reader.read_refs


async def test_a_history_with_images_goes_on_with_a_model_that_reads_only_text() -> None:
    url = "data:image/png;base64," + base64.b64encode(png(640, 480)).decode()
    messages = [user("see ", image(url)), {"role": "assistant", "content": "yes"}, user("go on")]
    assert "see [image: 640 × 480 PNG, left out: this model reads only text]" in said(await planned(*messages, model=MODEL))
    messages = [user(image("https://example.com/secret.png"), "?")]
    with pytest.raises(RequestError):
        await planned(*messages, model=MODEL)
    assert "[image left out: this model reads only text]?" in said(await planned(*messages, model=MODEL, drops=True))


def photo(segments: int) -> bytes:
    """A JPEG whose size comes after this many segments of metadata."""
    return b"\xff\xd8" + b"\xff\xe1\0\2" * segments + b"\xff\xc0\0\x11\x08" + struct.pack(">HH", 32, 64) + bytes(16)


async def test_a_history_with_many_images_does_not_hold_the_event_loop() -> None:
    """A header takes up to half a millisecond: those of 2,000 photos held it for a second."""
    url = "data:image/jpeg;base64," + base64.b64encode(photo(20)).decode()
    messages = [user(*[image(url)] * (FEW_NOTES + 1)), user("go on")]
    incoming, context, _ = await asked({"messages": messages}, MODEL)
    async with Turns() as turns:
        plan, _ = await parse_chat(incoming, context)
        assert turns.count
    assert said(plan).count("[image: 64 × 32 JPEG, left out: this model reads only text]") == FEW_NOTES + 1


class Watched(list[ImageRef]):
    """Images that note whether the event loop's thread has looked at one."""

    was_seen = False

    def __getitem__(self, index: Any) -> Any:
        self.was_seen |= threading.current_thread() is threading.main_thread()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[ImageRef]:
        self.was_seen |= threading.current_thread() is threading.main_thread()
        return super().__iter__()


@pytest.mark.parametrize("model", [SEEING, MODEL])
async def test_all_images_of_a_long_history_are_looked_at_beside_the_event_loop(model: ModelInfo) -> None:
    """A request of 200 bytes may continue one with hundreds of thousands."""
    incoming, context, reader = await asked({}, model)
    refs = Watched([ImageRef("conversation", "data:a", is_old=True) for _ in range(1000)])
    content = "".join([image_mark(index) for index in range(1000)])
    prompt = ChatPrompt([ChatMessage(role="user", content=content)])
    shown = await Images(refs, {}).show(prompt, {}, context.models.find(model.name), incoming.tenant, b"", context)
    assert not refs.was_seen
    assert len(reader.read_refs) == (1000 if model is SEEING else 0)
    notes = shown.prompt.messages[0]["content"].count("[image left out: this model reads only text]")
    assert notes == (0 if model is SEEING else 1000)


async def test_a_note_tells_the_size_of_an_image_in_lines_of_base64() -> None:
    url = "data:image/jpeg;base64," + base64.encodebytes(photo(20)).decode()
    assert "[image: 64 × 32 JPEG, left out" in said(await planned(user(image(url)), user("go on"), model=MODEL))


BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUFB"}}


async def test_messages_count_images_and_name_what_is_wrong_in_anthropics_words() -> None:
    body = {"messages": [user(BLOCK, "what?")], "max_tokens": 1}
    incoming, context, reader = await asked(body)
    plan, _ = await parse_messages(incoming, context)
    assert plan.submits[0].images[0].name == plan.pictures[0].name
    incoming, context, reader = await asked(body)
    assert (await count_message_tokens(incoming, context)).input_tokens == plan.prompt_tokens
    reader.refused = "QUFB"
    with pytest.raises(RequestError, match=r"^messages\.0\.content\.0\.image: Could not process image: .*broken") as refused:
        await parse_messages(incoming, context)
    assert (refused.value.param, refused.value.code) == ("messages[0].content[0].image", "invalid_image")
    with pytest.raises(RequestError, match="Could not process image"):
        await count_message_tokens(incoming, context)
    incoming, context, _ = await asked(body, MODEL)
    with pytest.raises(RequestError, match=r"^messages\.0\.content\.0\.image: Could not process image: .*not supported by this model"):
        await parse_messages(incoming, context)


@contextlib.asynccontextmanager
async def stored(reader: Reader, directory: Path) -> AsyncIterator[FrontEnd]:
    async with SqliteStore(directory / "r.db") as store:
        yield FrontEnd(says("ok"), images=SEEING.images, media=reader, responses=store)


def given(*urls: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_image", "image_url": url} for url in urls]}


async def test_truncation_drops_messages_with_their_images_and_reads_each_once() -> None:
    turns = [item for turn in range(40) for item in (given(f"data:{turn}"), {"role": "assistant", "content": "x" * 20})]
    incoming, context, reader = await asked({"input": [*turns, given("data:last")], "truncation": "auto", "max_output_tokens": 10})
    parsed: Any = await ResponseParser(context, None).parse(incoming)
    assert len(reader.read_refs) == 41
    kept = parsed.plan.submits[0].images
    assert 0 < len(kept) < 41
    assert wrong_images(parsed.plan.submits[0].token_ids, kept) is None
    assert len(parsed.plan.pictures) == len(kept)
    assert parsed.plan.prompt_tokens <= SEEING.context_length - 10


async def test_truncation_drops_images_beyond_their_limit() -> None:
    """An agent that sends a screenshot with every turn goes on, also if some of them were read in an earlier try."""
    turns = [given(f"data:{turn}") for turn in range(20)]
    body = {"input": turns, "max_output_tokens": 10}
    incoming, context, reader = await asked({**body, "truncation": "auto"})
    reader.max_images = 7
    parsed: Any = await ResponseParser(context, None).parse(incoming)
    assert len(parsed.plan.pictures) == 7
    assert len(reader.read_refs) == len({ref.field for ref in reader.read_refs}) == 7
    incoming, context, reader = await asked(body)
    reader.max_images = 7
    with pytest.raises(RequestError, match="one of 20 images"):
        await ResponseParser(context, None).parse(incoming)


async def test_an_image_on_another_server_is_stored_with_its_file(tmp_path: Path) -> None:
    """The next turn reads the file, whatever the other server has by then. Clients see the URL that they sent."""
    url = "https://example.com/a.png"
    reader = Reader()
    async with stored(reader, tmp_path) as front_end:
        await front_end.send("POST", "/v1/responses", json.dumps({"model": "m", "input": [given(url, "data:b")]}).encode())
        assert front_end.status == 200, front_end.body
        first = front_end.json["id"]
        assert reader.fetched == [url]
        assert [ref.url or ref.data for ref in reader.read_refs] == [reader.file, "data:b"]
        await front_end.send("GET", f"/v1/responses/{first}/input_items")
        parts = front_end.json["data"][0]["content"]
        assert parts == [{"type": "input_image", "image_url": each, "detail": "auto"} for each in (url, "data:b")]
        reader.read_refs.clear()
        again = {"model": "m", "input": "And?", "previous_response_id": first, "stream": True}
        await front_end.send("POST", "/v1/responses", json.dumps(again).encode())
        assert front_end.events[-1]["type"] == "response.completed"
        assert [ref.url or ref.data for ref in reader.read_refs] == [reader.file, "data:b"]
        assert reader.fetched == [url]
        await front_end.send("POST", "/v1/responses", json.dumps({"model": "m", "input": [given(url)], "store": False}).encode())
        assert reader.fetched == [url]
        reader.file = "A" * (MAX_FETCHED_BYTES // 3 * 4 + 4)
        await front_end.send("POST", "/v1/responses", json.dumps({"model": "m", "input": [given(url)]}).encode())
        assert (front_end.status, front_end.json["error"]["param"]) == (400, "input")


async def test_a_stored_image_stays_what_it_was(tmp_path: Path) -> None:
    """Also beside a new one with the same URL."""
    url = "https://example.com/now.png"
    reader = Reader()
    async with stored(reader, tmp_path) as front_end:
        await front_end.send("POST", "/v1/responses", json.dumps({"model": "m", "input": [given(url)]}).encode())
        first = front_end.json["id"]
        await front_end.send("GET", f"/v1/responses/{first}/input_items")
        earlier = {"type": "item_reference", "id": front_end.json["data"][0]["id"]}
        shown, reader.file = reader.file, "YmFy"
        reader.read_refs.clear()
        body = {"model": "m", "input": [earlier, given(url)]}
        await front_end.send("POST", "/v1/responses", json.dumps(body).encode())
        assert front_end.status == 200, front_end.body
        assert [ref.data for ref in reader.read_refs] == [shown, "YmFy"]
        assert reader.fetched == [url, url]


async def test_truncation_fetches_no_more_images_than_their_limit(tmp_path: Path) -> None:
    """Older ones are left out of every prompt, so nobody needs their files."""
    urls = [f"https://example.com/{turn}" for turn in range(20)]
    body = {"model": "m", "input": [*map(given, urls[:10]), given("data:a"), *map(given, urls[10:])], "max_output_tokens": 10}
    reader = Reader()
    reader.max_images = 12
    async with stored(reader, tmp_path) as front_end:
        await front_end.send("POST", "/v1/responses", json.dumps({**body, "truncation": "auto"}).encode())
        assert front_end.status == 200, front_end.body
        assert reader.fetched == urls[9:], "and the one that the request has itself"
        reader.fetched.clear()
        await front_end.send("POST", "/v1/responses", json.dumps(body).encode())
        assert (front_end.status, front_end.json["error"]["code"]) == (400, "too_many_images")
        assert not reader.fetched


@pytest.mark.parametrize("by", ["chain", "conversation", "reference"])
async def test_what_is_stored_counts_as_a_body_while_it_is_read(by: str, tmp_path: Path) -> None:
    """A chain has up to 64 MiB, and a request that continues it a hundred bytes."""
    reader = Reader()
    async with stored(reader, tmp_path) as front_end:
        held: list[int] = []
        reader.noticed = lambda: held.append(front_end.admission.bodies.used)
        large = {**given("data:" + "A" * 1_000_000), "id": "msg_large"}
        await front_end.send("POST", "/v1/conversations", json.dumps({"items": [large]}).encode())
        fields: dict[str, Any] = {"conversation": front_end.json["id"]}
        if by == "chain":
            await front_end.send("POST", "/v1/responses", json.dumps({"model": "m", "input": [large]}).encode())
            fields = {"previous_response_id": front_end.json["id"]}
        elif by == "reference":
            fields = {}
        asking = [{"role": "user", "content": "?"}, *([{"type": "item_reference", "id": "msg_large"}] if by == "reference" else [])]
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            held.clear()
            await front_end.send("POST", path, json.dumps({"model": "m", "input": asking, **fields}).encode())
            assert front_end.status == 200
            assert 1_000_000 < held[0] < 1_100_000
            assert not front_end.admission.bodies.used


@pytest.mark.parametrize("fails", [False, True])
async def test_nobody_holds_the_images_of_a_response_while_its_whole_answer_is_made(fails: bool, tmp_path: Path) -> None:
    """The store has them. It forgets them if there is no answer."""
    go_on = asyncio.Event()

    async def produce(request: Submit, mailbox: Mailbox) -> None:
        await go_on.wait()
        if fails:
            raise GenerationFault(Fault("lost", "the worker is gone"))
        await says("ok")(request, mailbox)

    def count(table: str) -> int:
        return int(sql(tmp_path / "r.db", f"SELECT COUNT(*) FROM {table}")[0][0])

    url = f"data:{fails}"
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(produce, images=SEEING.images, media=Reader(), responses=store)
        body = json.dumps({"model": "m", "input": [given(url, "https://example.com/a.png")]}).encode()
        answer = asyncio.create_task(front_end.send("POST", "/v1/responses", body))
        while not count("items"):
            await asyncio.sleep(0)
        while any(type(each) is dict and each.get("image_url") == url for each in gc.get_objects()):
            await asyncio.sleep(0)
        go_on.set()
        await answer
        assert front_end.status == (500 if fails else 200)
        assert (count("responses"), count("items")) == ((0, 0) if fails else (1, 2))


@pytest.mark.parametrize("fields", [{"text": {"format": {"type": "json_schema"}}}, {"prompt_cache_key": ""}, {"model": "none"}])
async def test_nothing_is_fetched_for_a_response_that_is_refused_anyway(fields: dict[str, Any], tmp_path: Path) -> None:
    incoming, context, reader = await asked({"input": [given("https://example.com/a.png")], **fields})
    async with SqliteStore(tmp_path / "r.db") as store:
        with pytest.raises(RequestError):
            await ResponseParser(context, store).parse(incoming)
    assert not reader.fetched


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_gets_the_images_of_its_responses(stream: bool, tmp_path: Path) -> None:
    """Also of one whose input the store has had since its beginning."""
    reader = Reader()
    async with stored(reader, tmp_path) as front_end:
        await front_end.send("POST", "/v1/conversations", json.dumps({"items": [given("data:a")]}).encode())
        conversation = front_end.json["id"]
        body = {"model": "m", "input": [given("https://example.com/b.png")], "conversation": conversation, "stream": stream}
        await front_end.send("POST", "/v1/responses", json.dumps(body).encode())
        assert front_end.status == 200
        await front_end.send("GET", f"/v1/conversations/{conversation}/items?order=asc")
        shown = [item["content"] for item in front_end.json["data"]]
        assert [content[0].get("image_url") for content in shown] == ["data:a", "https://example.com/b.png", None]
        assert all("file" not in key for content in shown for key in content[0])
        reader.read_refs.clear()
        body = {"model": "m", "input": "And?", "conversation": conversation}
        await front_end.send("POST", "/v1/responses", json.dumps(body).encode())
        assert [ref.url or ref.data for ref in reader.read_refs] == ["data:a", reader.file]
