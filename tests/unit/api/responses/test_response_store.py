"""The store in a real SQLite file: owners, limits, and what a crash leaves."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from front_end import response_object
from penstock.api.responses import rows
from penstock.api.responses.answers import ResponseStatus
from penstock.api.responses.database import Liveness
from penstock.api.responses.items import Item, new_id
from penstock.api.responses.rows import MAX_CHAIN, MAX_CHAIN_BYTES, NewResponse, PageWish, ResponseState
from penstock.api.responses.store import SqliteStore
from penstock.config.front_end import StoreLimits
from penstock.wire.errors import ConfigError, RequestError
from sqlite_file import sql

EVENTS = b"event: a\ndata: {}\n\nevent: b\ndata: {}\n\n"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def said(text: str, role: str = "user", item_id: str | None = None) -> Item:
    part = {"type": "output_text" if role == "assistant" else "input_text", "text": text}
    return {"id": item_id or new_id("message"), "type": "message", "role": role, "status": "completed", "content": [part]}


def texts(items: list[Item] | None) -> list[str]:
    assert items is not None
    return [item["content"][0]["text"] for item in items]


def asked(response_id: str, text: str, owner: str = "ann", **rest: Any) -> NewResponse:
    return NewResponse(id=response_id, owner=owner, root=rest.pop("root", response_id), input=[said(text)], **rest)


def answered(text: str = "", status: ResponseStatus = "completed", events: bytes | None = None) -> ResponseState:
    output = [said(text, "assistant")] if text else []
    return ResponseState(body=response_object(status=status, output=output), events=events)


RUNNING = answered(status="in_progress")


async def test_put_and_get(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "deep" / "r.db") as store:
        state = answered("Hello!")
        await store.put(asked("r1", "Hi"), state)
        found = await store.get("ann", "r1")
        assert found is not None
        assert found.body == state.body
        assert (found.body.status, found.is_background, found.has_events, found.is_here) == ("completed", False, False, False)
        page = await store.input_items("ann", "r1", PageWish())
        assert page is not None
        assert texts(page.items) == ["Hi"]
        assert await store.events("ann", "r1") is None
    assert stat.S_IMODE((tmp_path / "deep").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "deep" / "r.db").stat().st_mode) == 0o600


async def test_begin_and_finish(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        response = asked("r1", "Hi", is_background=True)
        await store.begin(response, RUNNING)
        found = await store.get("ann", "r1")
        assert found is not None
        assert (found.body.status, found.is_background, found.is_here) == ("in_progress", True, True)
        await store.finish(response, answered("Hello!", events=EVENTS))
        found = await store.get("ann", "r1")
        assert found is not None
        assert (found.body.status, found.has_events, found.is_here) == ("completed", True, False)
        assert await store.events("ann", "r1") == [b"event: a\ndata: {}\n\n", b"event: b\ndata: {}\n\n"]


async def test_a_deleted_response_does_not_come_back(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        response = asked("r1", "Hi")
        await store.begin(response, RUNNING)
        assert await store.delete("ann", "r1")
        await store.finish(response, answered("Hello!"))
        assert await store.get("ann", "r1") is None
        assert not await store.delete("ann", "r1")
        assert await store.find_items("ann", [response.input[0]["id"]]) == {}


async def test_references_and_conversations_have_as_much_as_a_chain(tmp_path: Path) -> None:
    """A small body may refer to an item with images again and again."""
    large = said("x" * (MAX_CHAIN_BYTES // 4))
    async with SqliteStore(tmp_path / "r.db") as store:
        conversation = (await store.create_conversation("ann", {}, [large])).id
        assert list(await store.find_items("ann", [large["id"]] * 3)) == [large["id"]]
        with pytest.raises(RequestError, match=r"`input` has 67,\d+,\d+ bytes: the limit is 67,108,864"):
            await store.find_items("ann", [large["id"]] * 4)
        await store.add_items("ann", conversation, [large, large])
        with pytest.raises(RequestError, match=r"`conversation` has 67,\d+,\d+ bytes: the limit is 67,108,864"):
            await store.add_items("ann", conversation, [large])
        assert len(await store.conversation_items("ann", conversation) or ()) == 3


async def test_another_owner_sees_and_changes_nothing(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        response = asked("r1", "Hi")
        await store.put(response, answered("Hello!", events=EVENTS))
        conversation = (await store.create_conversation("ann", {}, [said("a", item_id="msg_a")])).id
        attempts: list[Callable[[str], Awaitable[object]]] = [
            lambda owner: store.get(owner, "r1"),
            lambda owner: store.events(owner, "r1"),
            lambda owner: store.chain(owner, "r1"),
            lambda owner: store.input_items(owner, "r1", PageWish()),
            lambda owner: store.find_items(owner, [response.input[0]["id"], "msg_a"]),
            lambda owner: store.get_conversation(owner, conversation),
            lambda owner: store.conversation_page(owner, conversation, PageWish()),
            lambda owner: store.conversation_items(owner, conversation),
            lambda owner: store.get_item(owner, conversation, "msg_a"),
            lambda owner: store.update_conversation(owner, conversation, {"is": "changed"}),
            lambda owner: store.add_items(owner, conversation, [said("b")]),
            lambda owner: store.delete_item(owner, conversation, "msg_a"),
            lambda owner: store.delete_conversation(owner, conversation),
            lambda owner: store.delete(owner, "r1"),
        ]
        for number, attempt in enumerate(attempts):
            assert not await attempt("bob"), f"attempt {number}"
        for number, attempt in enumerate(attempts):
            assert await attempt("ann"), f"attempt {number} of the owner"


async def test_another_owner_cannot_finish_it(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        await store.begin(asked("r1", "Hi"), RUNNING)
        await store.finish(asked("r1", "Hi", owner="bob"), answered("mine now"))
        found = await store.get("ann", "r1")
        assert found is not None
        assert found.body.status == "in_progress"


async def test_chains(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        await store.put(asked("r1", "one"), answered("1"))
        await store.put(asked("r2", "two", previous="r1", root="r1"), answered("2"))
        await store.put(asked("r3", "three", previous="r2", root="r1"), answered("3", status="incomplete"))
        await store.put(asked("fork", "other", previous="r1", root="r1"), answered("4"))
        chain = await store.chain("ann", "r3")
        assert chain is not None
        assert (chain.root, chain.status, chain.missing) == ("r1", "incomplete", None)
        assert texts(chain.items) == ["one", "1", "two", "2", "three", "3"]
        fork = await store.chain("ann", "fork")
        assert fork is not None
        assert texts(fork.items) == ["one", "1", "other", "4"]
        await store.delete("ann", "r2")
        chain = await store.chain("ann", "r3")
        assert chain is not None
        assert chain.missing == "r2"


async def test_a_chain_does_not_lead_to_another_owner(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        await store.put(asked("r1", "secret", owner="bob"), answered("1"))
        await store.put(asked("r2", "two", previous="r1"), answered("2"))
        chain = await store.chain("ann", "r2")
        assert chain is not None
        assert texts(chain.items) == ["two", "2"]
        assert chain.missing == "r1"


async def test_chains_have_a_limit(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:

        def grow(connection: Any) -> None:
            for number in range(MAX_CHAIN + 1):
                previous = f"r{number - 1}" if number else None
                response = NewResponse(id=f"r{number}", owner="ann", root="r0", input=[], previous=previous)
                rows.insert_response(connection, response, answered(), 1e12, None)

        await store._database.run("", grow)
        assert await store.chain("ann", f"r{MAX_CHAIN - 1}") is not None
        with pytest.raises(RequestError, match="4,096"):
            await store.chain("ann", f"r{MAX_CHAIN}")


async def test_pages(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        items = [said(str(number), item_id=f"msg_{number}") for number in range(5)]
        await store.put(NewResponse(id="r1", owner="ann", root="r1", input=items), answered())
        seen, after = [], None
        for has_more in (True, True, False):
            page = await store.input_items("ann", "r1", PageWish(2, is_ascending=True, after=after))
            assert page is not None
            assert page.has_more == has_more
            seen += texts(page.items)
            after = page.items[-1]["id"]
        assert seen == ["0", "1", "2", "3", "4"]
        page = await store.input_items("ann", "r1", PageWish(2, after="msg_3"))
        assert page is not None
        assert (texts(page.items), page.has_more) == (["2", "1"], True)
        with pytest.raises(RequestError, match="`after` is 'msg_9'"):
            await store.input_items("ann", "r1", PageWish(after="msg_9"))


async def test_conversations(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        conversation = await store.create_conversation("ann", {"a": "b"}, [said("one", item_id="msg_1")])
        assert msgspec.to_builtins(conversation)["object"] == "conversation"
        updated = await store.update_conversation("ann", conversation.id, {"a": "c"})
        assert updated == msgspec.structs.replace(conversation, metadata={"a": "c"}) == await store.get_conversation("ann", conversation.id)
        added = await store.add_items("ann", conversation.id, [said("again", item_id="msg_1")])
        assert added is not None
        assert added[0]["id"] != "msg_1", "an id is of one item"
        assert texts(await store.conversation_items("ann", conversation.id)) == ["one", "again"]
        assert await store.delete_item("ann", conversation.id, "msg_1")
        assert texts(await store.conversation_items("ann", conversation.id)) == ["again"]
        assert await store.delete_conversation("ann", conversation.id)
        assert await store.conversation_items("ann", conversation.id) is None
        assert await store.find_items("ann", [added[0]["id"]]) == {}


async def test_concurrent_turns_lose_nothing(tmp_path: Path) -> None:
    """Two front ends, each with many turns at once."""
    async with SqliteStore(tmp_path / "r.db") as one, SqliteStore(tmp_path / "r.db") as other:
        conversation = (await one.create_conversation("ann", {}, [])).id

        async def turn(store: SqliteStore, number: int) -> None:
            response = asked(f"r{number}", f"question {number}", conversation=conversation)
            await store.begin(response, RUNNING)
            await store.finish(response, answered(f"answer {number}"))

        await asyncio.gather(*(turn(one if number % 2 else other, number) for number in range(40)))
        found = texts(await one.conversation_items("ann", conversation))
        pairs = [tuple(found[index : index + 2]) for index in range(0, len(found), 2)]
        assert sorted(pairs) == sorted((f"question {number}", f"answer {number}") for number in range(40))


@pytest.mark.parametrize(("status", "count"), [("completed", 2), ("incomplete", 2), ("failed", 0), ("cancelled", 0)])
async def test_failed_responses_are_not_added_to_the_conversation(tmp_path: Path, status: ResponseStatus, count: int) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        conversation = (await store.create_conversation("ann", {}, [])).id
        await store.put(asked("r1", "Hi", conversation=conversation), answered("Hello!", status))
        assert len(await store.conversation_items("ann", conversation) or ()) == count


async def test_old_responses_are_deleted(tmp_path: Path) -> None:
    clock = Clock()
    async with SqliteStore(tmp_path / "r.db", StoreLimits(seconds=100), clock) as store:
        await store.put(asked("r1", "Hi"), answered("Hello!", events=EVENTS))
        conversation = (await store.create_conversation("ann", {}, [])).id
        running = asked("r2", "Hi")
        await store.begin(running, RUNNING)
        clock.now += 60
        (item,) = await store.add_items("ann", conversation, [said("still here")]) or []
        assert await store.get("ann", "r1") is not None
        clock.now += 60
        assert await store.get("ann", "r1") is None
        assert await store.events("ann", "r1") is None
        assert await store.chain("ann", "r1") is None
        assert await store.get_conversation("ann", conversation) is not None, "it was used"
        assert await store.get("ann", "r2") is not None, "it is not over"
        clock.now += 60
        assert await store.get_conversation("ann", conversation) is None
        assert await store.update_conversation("ann", conversation, {}) is None, "nothing brings it back"
        assert not await store.delete_item("ann", conversation, item["id"])
        before = store.size
        await store.put(asked("r3", "Hi"), answered("Hello!"))
        assert store.size <= before, "what is old is removed, not only hidden"


async def test_the_oldest_are_deleted_when_the_store_is_full(tmp_path: Path) -> None:
    limit = 2**20
    async with SqliteStore(tmp_path / "r.db", StoreLimits(bytes=limit), Clock()) as store:
        running = asked("running", "Hi")
        await store.begin(running, RUNNING)
        conversation = (await store.create_conversation("ann", {}, [])).id
        for number in range(100):
            await store.put(asked(f"r{number}", "x" * 20_000), answered("y" * 20_000))
            assert store.size <= limit
        kept = [number for number in range(100) if await store.get("ann", f"r{number}") is not None]
        assert kept == list(range(100 - len(kept), 100)), "the newest are there"
        assert 15 <= len(kept) <= 30
        assert await store.get("ann", "running") is not None
        assert await store.get_conversation("ann", conversation) is None
        await store.put(asked("large", "x" * 2 * limit), answered("y"))
        assert await store.get("ann", "large") is not None, "what was just stored is there"
    assert (tmp_path / "r.db").stat().st_size < 5 * limit


async def test_who_fills_the_store_loses_its_own_oldest(tmp_path: Path) -> None:
    limit = 2**20
    async with SqliteStore(tmp_path / "r.db", StoreLimits(bytes=limit), Clock()) as store:
        conversation = (await store.create_conversation("bob", {}, [said("b" * 1000)])).id
        for number in range(5):
            await store.put(asked(f"b{number}", "x" * 20_000, "bob"), answered("y" * 20_000))
        for number in range(100):
            await store.put(asked(f"r{number}", "x" * 20_000), answered("y" * 20_000))
            await store.create_conversation("ann", {}, [said("z" * 10_000)])
            assert store.size <= limit
        assert [number for number in range(5) if await store.get("bob", f"b{number}") is None] == []
        assert len(await store.conversation_items("bob", conversation) or ()) == 1
        kept = [number for number in range(100) if await store.get("ann", f"r{number}") is not None]
        assert kept == list(range(100 - len(kept), 100))
        assert len(kept) >= 5
        assert store.evicted["full"] == 200 - 2 * len(kept)
    assert_sizes(tmp_path)


async def test_both_above_their_share_have_the_same_in_the_end(tmp_path: Path) -> None:
    limit = 2**20
    async with SqliteStore(tmp_path / "r.db", StoreLimits(bytes=limit), Clock()) as store:
        for number in range(60):
            await store.put(asked(f"a{number}", "x" * 20_000), answered("y"))
        for number in range(60):
            await store.put(asked(f"b{number}", "x" * 20_000, "bob"), answered("y"))
        kept = {owner: [n for n in range(60) if await store.get(owner, f"{owner[0]}{n}") is not None] for owner in ("ann", "bob")}
        assert abs(len(kept["ann"]) - len(kept["bob"])) <= 1
        assert all(numbers == list(range(60 - len(numbers), 60)) for numbers in kept.values()), "the newest of each"


async def test_where_owners_can_be_invented_the_oldest_of_all_go(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db", StoreLimits(bytes=2**20), Clock(), by_owner=False) as store:
        for number in range(60):
            await store.put(asked(f"r{number}", "x" * 20_000, f"owner {number % 7}"), answered("y" * 20_000))
        kept = [number for number in range(60) if await store.get(f"owner {number % 7}", f"r{number}") is not None]
        assert kept == list(range(60 - len(kept), 60))


async def test_a_conversation_that_fills_the_store_alone_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db", StoreLimits(bytes=2**20), Clock()) as store:
        await store.put(asked("b", "x" * 10_000, "bob"), answered("y"))
        await store.put(asked("a", "x" * 10_000), answered("y"))
        conversation = (await store.create_conversation("ann", {}, [])).id
        await store.add_items("ann", conversation, [said("x" * 300_000)])
        for write in (
            lambda: store.add_items("ann", conversation, [said("x" * 2_000_000)]),
            lambda: store.create_conversation("ann", {}, [said("x" * 2_000_000)]),
        ):
            with pytest.raises(RequestError) as error:
                await write()
            assert (error.value.status, error.value.code) == (507, "store_full")
        assert len(await store.conversation_items("ann", conversation) or ()) == 1
        assert await store.get("ann", "a") is not None
        assert await store.get("bob", "b") is not None
    assert_sizes(tmp_path)


async def test_one_conversation_does_not_grow_at_the_expense_of_who_has_less(tmp_path: Path) -> None:
    """Many owners with little make the average small, so that everybody else is above it."""
    async with SqliteStore(tmp_path / "r.db", StoreLimits(bytes=2**20), Clock()) as store:
        for number in range(40):
            await store.put(asked(f"small_{number}", "x", owner=f"owner {number}"), answered())
        for number in range(3):
            await store.put(asked(f"bob_{number}", "x" * 100_000, owner="bob"), answered())
        conversation = await store.create_conversation("ann", {}, [])
        with pytest.raises(RequestError, match="the store is full"):
            for _ in range(20):
                await store.add_items("ann", conversation.id, [said("y" * 100_000)])
        assert [await store.get("bob", f"bob_{number}") is not None for number in range(3)] == [True] * 3
        assert (await store.conversation_page("ann", conversation.id, PageWish(limit=1))) is not None


async def test_changed_metadata_counts_like_any_other_write(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db", StoreLimits(bytes=2**20), Clock()) as store:
        conversations = [await store.create_conversation("ann", {}, []) for _ in range(300)]
        for conversation in conversations:
            await store.update_conversation("ann", conversation.id, {f"{key}": "x" * 500 for key in range(16)})
        kept = [conversation for conversation in conversations if await store.get_conversation("ann", conversation.id) is not None]
        assert 50 < len(kept) < 130, "each takes 8 KB and more"


async def test_many_writes_of_one_owner_do_not_keep_another_waiting(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db", clock=Clock()) as store:
        flood = [asyncio.create_task(store.create_conversation("ann", {}, [said("x")] * 500)) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.gather(*[store.get("bob", f"b{number}") for number in range(3)])
        assert sum(task.done() for task in flood) <= 6, "one of the other's for each"
        left = flood.pop()
        left.cancel()
        await asyncio.gather(*flood)
        assert await store.get("ann", "a") is None, "a caller that leaves while it waits takes no turn with it"


async def test_sizes_follow_every_change(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db", clock=Clock()) as store:
        conversation = (await store.create_conversation("ann", {"a": "b"}, [said("Hi"), said("Ho")])).id
        await store.begin(asked("r1", "Hi", conversation=conversation), RUNNING)
        await store.finish(asked("r1", "Hi", conversation=conversation), answered("Hello!", events=EVENTS))
        await store.put(asked("r2", "Hi", "bob"), answered("Hello!"))
        await store.update_conversation("ann", conversation, {"a": "much longer than before"})
        item = said("again", item_id="msg_1")
        await store.add_items("ann", conversation, [item])
        await store.add_items("ann", conversation, [item])
        await store.delete_item("ann", conversation, "msg_1")
        assert_sizes(tmp_path)
        await store.delete("bob", "r2")
        assert_sizes(tmp_path)
        await store.delete_conversation("ann", conversation)
        await store.delete("ann", "r1")
    assert sql(tmp_path / "r.db", "SELECT COUNT(*) FROM owners") == [(0,)]


async def test_a_file_from_before_sizes_were_kept_gets_them(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        await store.put(asked("r1", "Hi"), answered("Hello!", events=EVENTS))
        await store.create_conversation("bob", {}, [said("Hi")])
    for (trigger,) in sql(tmp_path / "r.db", "SELECT name FROM sqlite_master WHERE type = 'trigger'"):
        sql(tmp_path / "r.db", f"DROP TRIGGER {trigger}")
    sql(tmp_path / "r.db", "DROP TABLE owners")
    async with SqliteStore(tmp_path / "r.db") as store:
        await store.put(asked("r2", "Hi"), answered("Hello!"))
    assert_sizes(tmp_path)


def assert_sizes(folder: Path) -> None:
    found = sql(folder / "r.db", "SELECT owner, SUM(bytes) FROM sizes GROUP BY owner ORDER BY owner")
    assert sql(folder / "r.db", "SELECT owner, bytes FROM owners ORDER BY owner") == found


async def test_another_process_reads_the_same_store(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        await store.put(asked("r1", "Hi"), answered("Hello!", events=EVENTS))
    async with SqliteStore(tmp_path / "r.db") as store:
        found = await store.get("ann", "r1")
        assert found is not None
        assert found.body.output[0]["content"][0]["text"] == "Hello!"
        assert await store.events("ann", "r1") is not None
    assert marks(tmp_path) == 0


async def test_unfinished_responses_of_a_closed_store_have_failed(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as other:
        async with SqliteStore(tmp_path / "r.db") as store:
            await store.begin(asked("r1", "Hi"), RUNNING)
            found = await other.get("ann", "r1")
            assert found is not None
            assert (found.body.status, found.is_here) == ("in_progress", False), "it is alive"
        found = await other.get("ann", "r1")
        assert found is not None
        assert found.body.status == "failed"


DIES = """
import asyncio, os, sys
from pathlib import Path
import msgspec
from penstock.api.responses.answers import ResponseObject
from penstock.api.responses.store import SqliteStore
from penstock.api.responses.rows import NewResponse, ResponseState

async def main():
    async with SqliteStore(Path(sys.argv[1])) as store:
        running, over = [msgspec.json.decode(body, type=ResponseObject) for body in sys.argv[2:]]
        await store.begin(NewResponse(id="r1", owner="ann", root="r1", input=[]), ResponseState(body=running))
        await store.put(NewResponse(id="r2", owner="ann", root="r2", input=[]), ResponseState(body=over))
        print("begun", flush=True)
        sys.stdin.read()

asyncio.run(main())
"""


def start_process(path: Path) -> subprocess.Popen[bytes]:
    bodies = [msgspec.json.encode(state.body).decode() for state in (RUNNING, answered())]
    return subprocess.Popen([sys.executable, "-c", DIES, str(path), *bodies], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def marks(folder: Path) -> int:
    """The number of processes that are marked as alive."""
    return len(list(folder.glob("*-runner-*")))


async def test_unfinished_responses_of_a_dead_process_have_failed(tmp_path: Path) -> None:
    """After SIGKILL, both a store that is open and one that is opened later notice."""
    path = tmp_path / "r.db"
    async with SqliteStore(path) as there:
        process = start_process(path)
        assert process.stdout is not None
        assert process.stdin is not None
        with process.stdout, process.stdin:
            assert (await asyncio.to_thread(process.stdout.readline)).strip() == b"begun"
            found = await there.get("ann", "r1")
            assert found is not None
            assert found.body.status == "in_progress"
            process.kill()
            await asyncio.to_thread(process.wait)
        found = await there.get("ann", "r1")
        assert found is not None
        assert found.body.status == "failed"
        assert found.body.error is not None
        assert "has ended" in found.body.error.message
        found = await there.get("ann", "r2")
        assert found is not None
        assert found.body.status == "completed"
    async with SqliteStore(path):
        assert marks(tmp_path) == 1, "those of the dead are removed"


def test_liveness(tmp_path: Path) -> None:
    one, other = Liveness(tmp_path / "f"), Liveness(tmp_path / "f")
    assert one.is_alive(other.name)
    assert one.is_alive(one.name)
    one.forget_dead()
    assert one.is_alive(other.name)
    assert other.is_alive(one.name), "asking takes no lock away"
    other.close()
    assert not one.is_alive(other.name)
    assert not one.is_alive("0000")
    one.close()


async def test_a_path_that_cannot_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "r.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"--response-store .*r\.db"):
        await SqliteStore(tmp_path / "r.db").__aenter__()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--response-store"):
        await SqliteStore(tmp_path / "file" / "r.db").__aenter__()


async def test_a_file_of_another_version(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db"):
        sql(tmp_path / "r.db", "PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match="version 99"):
        await SqliteStore(tmp_path / "r.db").__aenter__()


async def test_a_failed_transaction_changes_nothing(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        conversation = (await store.create_conversation("ann", {}, [])).id
        with pytest.raises(KeyError):
            await store.add_items("ann", conversation, [said("one"), {"type": "message"}])
        assert await store.conversation_items("ann", conversation) == []


async def test_a_store_that_fails_while_closing_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    async with SqliteStore(path) as store:
        await store.begin(asked("r1", "Hi"), RUNNING)
        sql(tmp_path / "r.db", "ALTER TABLE responses RENAME TO hidden")
    assert not list(tmp_path.glob("r.db-runner-*"))  # noqa: ASYNC240, it is over
    async with SqliteStore(path) as store:
        sql(tmp_path / "r.db", "DROP TABLE responses")
        sql(tmp_path / "r.db", "ALTER TABLE hidden RENAME TO responses")
        found = await store.get("ann", "r1")
        assert found is not None
        assert found.body.status == "failed"


async def test_a_failure_is_reported_and_the_store_recovers(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        sql(tmp_path / "r.db", "ALTER TABLE responses RENAME TO hidden")
        with pytest.raises(RequestError) as caught:
            await store.put(asked("r1", "Hi"), answered("Hello!"))
        assert (caught.value.status, caught.value.code) == (503, "store_unavailable")
        sql(tmp_path / "r.db", "ALTER TABLE hidden RENAME TO responses")
        await store.put(asked("r1", "Hi"), answered("Hello!"))
        assert await store.get("ann", "r1") is not None
