"""Keeping a response while it is made: no client sees its end before it is in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable

from penstock.api.pipeline.response import Sink
from penstock.api.responses.dialect import ResponseDialect
from penstock.api.responses.rows import NewResponse, ResponseState
from penstock.api.responses.store import SqliteStore
from penstock.stream.fanin import all_done
from penstock.wire.errors import GenerationFault, RequestError


class SavingSink:
    """A sink that stores on the way to another: that a stream has begun before its first event, how it ended before its last.

    If its beginning cannot be stored, the stream goes on; if its end cannot, it ends as failed, and a whole answer is refused with
    RequestError. Whoever sends events may be cancelled: what is being stored then is stored, and sent. `sent` are the events so far.
    """

    def __init__(
        self,
        inner: Sink,
        store: SqliteStore,
        response: NewResponse,
        dialect: ResponseDialect,
        sent: Iterable[bytes] = (),
        begun: bool = False,
    ) -> None:
        self._inner = inner
        self._store = store
        self._response = response
        self._dialect = dialect
        self._sent = sent
        self._is_known = begun
        """The store has it."""
        self._storing: asyncio.Task[None] | None = None
        self.has_begun = begun
        """Somebody may have seen it."""
        self.is_stored = False
        """The store has its end."""

    @property
    def sending_since(self) -> float | None:
        return self._inner.sending_since

    @sending_since.setter
    def sending_since(self, value: float | None) -> None:
        self._inner.sending_since = value

    @property
    def stalled(self) -> bool:
        return self._inner.stalled

    @stalled.setter
    def stalled(self, value: bool) -> None:
        self._inner.stalled = value

    async def send_whole(self, status: int, body: bytes) -> None:
        await self._finish(None)
        await self._inner.send_whole(status, body)

    def send_events(self, events: bytes, last: bool = False) -> Awaitable[None]:
        if self.has_begun and not last:
            return self._inner.send_events(events)
        return self._store_and_send(events, last)

    async def fail(self, error: GenerationFault | RequestError) -> None:
        """Nothing more will come, because of this. Of what nobody has seen yet nothing is kept."""
        await self._settled()
        if self.has_begun and not self._dialect.is_over:
            await self._store_and_send(self._dialect.fail(error), last=True)

    async def cancel(self) -> None:
        """It was stopped."""
        await self._settled()
        if self.has_begun and not self._dialect.is_over:
            await self._store_and_send(self._dialect.cancel(), last=True)

    async def _store_and_send(self, events: bytes, last: bool) -> None:
        # In a task of its own: a cancelled write may or may not have been done, and nobody would know which.
        self._storing = asyncio.create_task(self._store_then_send(events, last))
        await all_done([self._storing])
        self._storing.result()

    async def _settled(self) -> None:
        """Nothing is being stored any more."""
        if self._storing is not None:
            await all_done([self._storing])

    async def _store_then_send(self, events: bytes, last: bool) -> None:
        try:
            if last:
                await self._finish(b"".join([*self._sent, events]))
            else:
                await self._begin()
        except RequestError as error:
            if last:
                events = self._dialect.fail_instead(events, error)
        self.has_begun = True
        await self._inner.send_events(events, last)

    async def _begin(self) -> None:
        await self._store.begin(self._response, ResponseState(body=self._dialect.snapshot()))
        self._is_known = True

    async def _finish(self, events: bytes | None) -> None:
        state = ResponseState(body=self._dialect.snapshot(), events=events)
        await (self._store.finish if self._is_known else self._store.put)(self._response, state)
        self.is_stored = True
