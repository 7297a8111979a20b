"""Requests with thousands of messages are read beside the event loop, and a chat that is cut to fit is tokenized once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from front_end import MODEL, WORDS, Turns, request
from penstock.api.anthropic.messages import count_message_tokens, parse_messages
from penstock.api.openai.chat import parse_chat
from penstock.api.pipeline.request import Incoming
from penstock.api.responses.items import read_items
from penstock.api.responses.parse import ParsedResponse, ResponseParser
from penstock.api.responses.rows import PageWish
from penstock.api.responses.store import SqliteStore
from penstock.api.responses.stored import Conversations
from penstock.text.encoding import MAX_AT_ONCE_BYTES, Encoder
from penstock.wire.errors import RequestError

# The last message is wrong, so each is refused as soon as it has been read.
CHAT = [*[{"role": "user", "content": "x"}] * 4000, {"role": "tool", "content": "x"}]
BLOCKS = [*[{"role": "user", "content": "x"}] * 4000, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]
ITEMS = [*[{"role": "user", "content": "x"}] * 4000, {"type": "function_call_output", "call_id": "c", "output": "x"}]


async def parse_response(incoming: Incoming, context: Any) -> object:
    return await ResponseParser(context, None).parse(incoming)


@pytest.mark.parametrize(
    ("parse", "fields", "wrong"),
    [
        (parse_chat, {"messages": CHAT}, "messages[4000].tool_call_id"),
        (parse_messages, {"messages": BLOCKS, "max_tokens": 1}, "messages[4000].content[0].tool_use_id"),
        (count_message_tokens, {"messages": BLOCKS}, "messages[4000].content[0].tool_use_id"),
        (parse_response, {"input": ITEMS}, "input[4000].call_id"),
    ],
)
async def test_others_go_on_while_thousands_of_messages_are_read(
    parse: Callable[..., Coroutine[Any, Any, object]], fields: dict[str, Any], wrong: str
) -> None:
    incoming, context = await request({"model": "m", **fields})
    looked = len(incoming.body) // (64 * 1024) + 1
    async with Turns() as turns:
        with pytest.raises(RequestError) as caught:
            await parse(incoming, context)
        assert caught.value.param == wrong
        assert turns.count > looked + 1, "a turn for each piece that is looked at, and more while a thread reads"


async def test_a_short_request_is_read_at_once() -> None:
    encoder = Encoder()
    assert await encoder.read("", MAX_AT_ONCE_BYTES, threading.get_ident) == threading.get_ident()
    assert await encoder.read("", MAX_AT_ONCE_BYTES + 1, threading.get_ident) != threading.get_ident()
    encoder.close()


class Noting(Encoder):
    """Notes in which thread each function reads a part of a request."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: dict[str, int] = {}

    async def read(self, lane: str, size: int, work: Callable[..., Any], *arguments: Any) -> Any:
        def noted(*given: Any) -> Any:
            self.readers[work.__name__] = threading.get_ident()
            return work(*given)

        return await super().read(lane, size, noted, *arguments)


@pytest.mark.parametrize("by", ["conversation", "reference"])
async def test_a_short_request_that_names_a_long_history_is_read_beside_the_event_loop(by: str, tmp_path: Path) -> None:
    """It is as much to read as its bytes in the store say: one item may have thousands of parts."""
    long = {"role": "user", "content": [{"type": "input_text", "text": "x"}, *[{"type": "input_text", "text": ""}] * 2000]}
    async with SqliteStore(tmp_path / "r.db") as store:
        owner = (await request({}))[0].owner
        conversation = await store.create_conversation(owner, {}, read_items("items", [long]))
        page = await store.conversation_page(owner, conversation.id, PageWish())
        assert page is not None
        named = {"input": [{"type": "item_reference", "id": page.items[0]["id"]}]}
        incoming, context = await request({"model": "m", **({"conversation": conversation.id} if by == "conversation" else named)})
        context.transcripts.encoder = encoder = Noting()
        parser = ResponseParser(context, store)
        for parse in (parser.parse, parser.count):
            encoder.readers.clear()
            await parse(incoming)
            assert encoder.readers.keys() >= {"check_outputs", "read_tools"}
            readers = {name for name, thread in encoder.readers.items() if thread == threading.get_ident()}
            assert readers <= {"read_items"}, "the request itself is short"
        encoder.close()


async def test_an_item_with_thousands_of_parts_is_added_beside_the_event_loop(tmp_path: Path) -> None:
    long = {"role": "user", "content": [{"type": "input_text", "text": "x"}] * 4000}
    async with SqliteStore(tmp_path / "r.db") as store:
        incoming, context = await request({"items": [long]})
        context.transcripts.encoder = encoder = Noting()
        conversations = Conversations(store, context)
        created = await conversations.create(incoming)
        readers = [encoder.readers.pop("_read", None)]
        added = await conversations.add_items(structs.replace(incoming, path={"id": created.id}))
        readers.append(encoder.readers.pop("_read", None))
        assert len(added.data[0]["content"]) == 4000
        assert not {None, threading.get_ident()} & {*readers}
        encoder.close()


async def test_a_chat_that_is_cut_to_fit_is_tokenized_once() -> None:
    model = structs.replace(MODEL, context_length=4000)
    items = [{"role": "user", "content": f"{index} " + "word " * 50} for index in range(400)]
    incoming, context = await request({"model": "m", "input": items, "truncation": "auto", "max_output_tokens": 100}, model)
    parsed = await ResponseParser(context, None).parse(incoming)
    assert isinstance(parsed, ParsedResponse)
    whole = sum(len(WORDS.encode(item["content"])) for item in items)
    assert 3500 < len(parsed.plan.submits[0].token_ids) <= 3900
    assert context.transcripts.tokens_encoded < 1.2 * whole
    text = WORDS.decode(parsed.plan.submits[0].token_ids)
    assert text.count("word") % 50 == 0, "only whole messages are dropped"
    assert f"{len(items) - 1} word" in text
