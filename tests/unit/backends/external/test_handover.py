"""KV that one engine hands to another: which tickets are used, and what happens when no KV comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

from penstock.backends.external.engine import Chunk, EngineDied, EngineFacts, EngineRefused, EngineRequest, KvMoves
from penstock.backends.external.handover import MAX_TICKET_BYTES, HandoverFailed, Handovers, Ticket, read_ticket
from penstock.wire.messages import Export, Fault, KvSource, TransferReport

TRANSFER = bytes(range(16))
MADE, LEASE = 1000.0, 12.0
TICKET = Ticket(MADE, LEASE, b"where")
SOURCE = KvSource(TRANSFER, "", ticket=TICKET.pack())
REQUEST = EngineRequest("a", (1, 2, 3), 4, None, source=SOURCE)
CHUNKS = (Chunk((5,)), Chunk((6,), finish="length"))


class Engine:
    """Says what the test tells it, first for a request with a source. `silent`: it says nothing to such a request."""

    def __init__(self, *pulled: Chunk | Exception, silent: bool = False) -> None:
        self.pulled = pulled
        self.silent = silent
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.when_asked: Callable[[], None] = lambda: None

    async def start(self, on_death: Callable[[str], None]) -> EngineFacts:
        raise NotImplementedError

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        self.when_asked()
        try:
            if request.source is not None and self.silent:
                await asyncio.Event().wait()
            for said in self.pulled if request.source is not None else CHUNKS:
                if isinstance(said, Exception):
                    raise said
                yield said
        except asyncio.CancelledError:
            self.aborted.append(request.id)
            raise

    def pulled_bytes(self) -> int:
        return 4096 * len(self.requests)

    async def ping(self) -> None: ...

    async def close_session(self, session_id: str) -> None: ...

    async def close(self) -> None: ...


class Rig:
    def __init__(self, engine: Engine, moves: KvMoves | None = None, patience: float = 60.0) -> None:
        self.engine = engine
        self.now = MADE
        self.arrived: float | None = None
        """None: now."""
        self.reports: list[TransferReport] = []
        self.handovers = Handovers(engine, self.reports.append, patience, lambda: 0.0, lambda: self.now)
        self.handovers.moves = moves or KvMoves("ticket", b"fingerprint", block_bytes=1024)

    async def tokens(self, request: EngineRequest = REQUEST) -> list[int]:
        assert request.source is not None
        arrived = self.now if self.arrived is None else self.arrived
        return [token async for chunk in self.handovers.generate(request, request.source, arrived) for token in chunk.token_ids]

    @property
    def outcomes(self) -> list[str | None]:
        return [report.outcome for report in self.reports]


async def test_the_kv_comes() -> None:
    rig = Rig(Engine(*CHUNKS))
    assert await rig.tokens() == [5, 6]
    assert rig.reports == [TransferReport(TRANSFER, "done", 4, 4096)]
    assert [request.source for request in rig.engine.requests] == [SOURCE]
    await rig.tokens()
    assert rig.reports[1] == TransferReport(TRANSFER, "done", 4, 4096), "only what came since the last report"


@pytest.mark.parametrize("age", [LEASE / 3, LEASE, 1e9, -1.1])
async def test_a_ticket_is_used_in_the_first_third_of_its_lease(age: float) -> None:
    """The engine would read the KV of another prompt, without an error."""
    rig = Rig(Engine(*CHUNKS))
    rig.now = MADE + age
    assert [read_ticket(SOURCE.ticket, good, good) for good in (MADE + LEASE / 3 - 0.1, MADE - 0.9)] == [TICKET, TICKET]
    assert await rig.tokens() == [5, 6]
    assert [request.source for request in rig.engine.requests] == [None], "the engine never saw the ticket"
    assert rig.outcomes == ["failed"]
    with pytest.raises(HandoverFailed, match=r"s old: expected 0 to 4\.0 s"):
        read_ticket(SOURCE.ticket, rig.now, rig.now)


async def test_a_ticket_from_the_future_is_not_used_later_either() -> None:
    """The clock of its engine is seven seconds ahead. After as many seconds in the queue it looks new, and its lease is nearly over."""
    rig = Rig(Engine(*CHUNKS))
    rig.arrived, rig.now = MADE - 7.0, MADE
    assert await rig.tokens() == [5, 6]
    assert [request.source for request in rig.engine.requests] == [None]
    assert rig.outcomes == ["failed"]


@pytest.mark.parametrize(
    "packed",
    [
        *(b"", b"\xc1", b"nonsense", TICKET.pack()[:-1], b"\x93\x01\x02", bytes(MAX_TICKET_BYTES + 1)),
        *(Ticket(made, lease, b"").pack() for made, lease in ((MADE, 0.0), (MADE, 1e9), (float("nan"), LEASE))),
    ],
    ids=lambda packed: packed[:8].hex(),
)
async def test_bytes_that_are_no_ticket(packed: bytes) -> None:
    rig = Rig(Engine(*CHUNKS))
    source = KvSource(TRANSFER, "", ticket=packed)
    assert await rig.tokens(EngineRequest("a", (1, 2, 3), 4, None, source=source)) == [5, 6]
    assert [request.source for request in rig.engine.requests] == [None]
    assert rig.outcomes == ["failed"]


async def test_an_engine_that_gets_no_kv_is_stopped_and_computes() -> None:
    rig = Rig(Engine(silent=True), patience=0.01)
    assert await rig.tokens() == [5, 6]
    assert rig.engine.aborted == ["a"]
    first, second = rig.engine.requests
    assert (first.source, second.source, first.token_ids) == (SOURCE, None, second.token_ids)
    assert first.id != second.id, "the engine may still be ending the first"
    assert rig.outcomes == ["failed"]
    assert "no token came within" in rig.reports[0].reason
    assert rig.handovers.imports == 0


@pytest.mark.parametrize("said", [(), (EngineRefused(Fault("engine_aborted", "error", retryable=True)),), (HandoverFailed("no"),)], ids=str)
async def test_an_engine_that_gives_up_computes(said: tuple[Exception, ...]) -> None:
    rig = Rig(Engine(*said))
    assert await rig.tokens() == [5, 6]
    assert rig.outcomes == ["failed"]


async def test_after_its_first_token_a_failure_is_one_of_the_generation() -> None:
    rig = Rig(Engine(CHUNKS[0], EngineRefused(Fault("engine_error", "broken"))))
    with pytest.raises(EngineRefused, match="broken"):
        await rig.tokens()
    assert rig.outcomes == ["done"]


@pytest.mark.parametrize("silent", [False, True])
async def test_an_engine_that_may_have_read_too_late_is_not_used_again(silent: bool) -> None:
    """It was stopped for seconds after the ticket was checked. What it read may be cached under the prompt's name."""
    rig = Rig(Engine(*CHUNKS, silent=silent), patience=0.01)

    def sleep() -> None:
        rig.now += LEASE

    rig.engine.when_asked = sleep
    with pytest.raises(EngineDied, match="after its lease"):
        await rig.tokens()
    assert len(rig.engine.requests) == 1


async def test_the_patience_ends_before_the_lease() -> None:
    rig = Rig(Engine(silent=True), patience=1e9)
    rig.handovers.moves = KvMoves("ticket", b"fingerprint")
    ticket = Ticket(MADE, 0.8, b"where")
    assert await rig.tokens(EngineRequest("a", (1, 2, 3), 4, None, source=KvSource(TRANSFER, "", ticket=ticket.pack()))) == [5, 6]
    assert rig.engine.aborted == ["a"]
    assert [report.reason for report in rig.reports] == ["no token came within 0.5 s"], "the end of the wait is not the end of the engine"


async def test_an_engine_that_cannot_compute_lets_another_worker_go_on() -> None:
    rig = Rig(Engine(), KvMoves("meeting", b"fingerprint", computes=False))
    with pytest.raises(EngineRefused) as caught:
        await rig.tokens()
    assert (caught.value.fault.code, caught.value.fault.retryable) == ("transfer_failed", True)
    assert rig.outcomes == ["failed"]
    assert len(rig.engine.requests) == 1


async def test_a_ticket_is_reported_and_expires() -> None:
    rig = Rig(Engine())
    export, ticket = Export(TRANSFER, 5.0), Ticket(MADE, 0.03, b"where").pack()
    rig.handovers.give(export, ticket)
    assert rig.reports == [TransferReport(TRANSFER, ticket=ticket)]
    assert rig.handovers.exports == 1
    async with asyncio.timeout(5):
        while rig.handovers.exports:
            await asyncio.sleep(0.001)
    assert rig.outcomes == [None, "expired"]
    rig.handovers.give(export, ticket)
    rig.handovers.end(TRANSFER)
    rig.handovers.end(TRANSFER)
    assert rig.handovers.exports == 0


async def test_an_engine_without_a_ticket_says_so() -> None:
    rig = Rig(Engine())
    rig.handovers.give(Export(TRANSFER, 5.0), b"")
    assert rig.outcomes == ["failed"]
