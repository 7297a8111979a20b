"""GET, DELETE and cancel of /v1/responses/{id}: responses that were made before, or are being made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.types import Receive

from penstock.api.pipeline.detached import DetachedRun, DetachedRuns, Recording
from penstock.api.pipeline.request import Incoming
from penstock.api.pipeline.response import Response
from penstock.api.responses.dialect import RUNNING, ResponseDialect
from penstock.api.responses.events import encoded_event
from penstock.api.responses.paging import check_query, list_body, page_wish
from penstock.api.responses.store import ResponseStore, StoredResponse
from penstock.metrics.frontend import Tally
from penstock.wire.errors import RequestError

_INCLUDES = ("include", "include[]")
_MOST_DIGITS = 15


@dataclass(frozen=True)
class StoredResponses:
    """Those of the store, and, of those that are being made here, what they are now."""

    store: ResponseStore
    detached: DetachedRuns
    tally: Tally

    async def get(self, incoming: Incoming, receive: Receive, response: Response) -> str:
        """With `stream`, its events behind number `starting_after`: those that there are, and those that come."""
        check_query(incoming.query, ("stream", "starting_after", "include_obfuscation", *_INCLUDES))
        is_stream, after = _stream_wish(incoming.query)
        run = self._running(incoming)
        if run is not None and is_stream:
            return await self._resume(run, after, receive, response)
        if run is not None and _dialect(run).is_over:
            # Its end is being stored, and is not its end before that is done.
            await run.ended()
            run = self._running(incoming)
        if run is not None:
            return await _send(response, _dialect(run).snapshot())
        found = await self._find(incoming)
        if is_stream:
            return await self._replay(incoming, found, after, receive, response)
        return await _send(response, found.body)

    async def delete(self, incoming: Incoming, receive: Receive, response: Response) -> str:  # noqa: ARG002
        response_id = incoming.path["id"]
        run = self._running(incoming)
        if not await self.store.delete(incoming.owner, response_id):
            raise _not_found(response_id)
        if run is not None:
            run.cancel()
            await run.ended()
            self.detached.forget(response_id)
        return await _send(response, {"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, incoming: Incoming, receive: Receive, response: Response) -> str:  # noqa: ARG002
        """Stops one that runs in the background. One that is over stays as it is."""
        found = await self._find(incoming)
        if not found.is_background:
            message = "only a response with `background` true can be cancelled; to stop another, close its connection"
            raise RequestError(message, param="id", code="not_cancellable")
        run = self._running(incoming)
        if run is not None:
            run.cancel()
            await run.ended()
            found = await self._find(incoming)
        elif found.status in RUNNING:
            raise _elsewhere(incoming.path["id"])
        return await _send(response, found.body)

    async def input_items(self, incoming: Incoming, receive: Receive, response: Response) -> str:  # noqa: ARG002
        check_query(incoming.query, ("limit", "order", "after", "before", *_INCLUDES))
        page = await self.store.input_items(incoming.owner, incoming.path["id"], page_wish(incoming.query))
        if page is None:
            raise _not_found(incoming.path["id"])
        return await _send(response, list_body(page))

    def _running(self, incoming: Incoming) -> DetachedRun | None:
        run = self.detached.find(incoming.owner, incoming.path["id"])
        return run if run is not None and isinstance(run.detail, ResponseDialect) else None

    async def _find(self, incoming: Incoming) -> StoredResponse:
        response_id = incoming.path["id"]
        found = await self.store.get(incoming.owner, response_id)
        if found is None:
            raise _not_found(response_id)
        if found.is_here and self._running(incoming) is None:
            # It has ended, and that could not be stored.
            error = {"code": "server_error", "message": "the response was lost: it could not be stored"}
            return replace(found, body={**found.body, "status": "failed", "error": error}, is_here=False)
        return found

    async def _resume(self, run: DetachedRun, after: int, receive: Receive, response: Response) -> str:
        _check_after(after, len(run.recording.events), run.is_over)
        self.tally.streams_resumed += 1
        return await self.detached.follow(run, receive, response, after)

    async def _replay(self, incoming: Incoming, found: StoredResponse, after: int, receive: Receive, response: Response) -> str:
        response_id = incoming.path["id"]
        events = await self.store.events(incoming.owner, response_id)
        if events is not None:
            _check_after(after, len(events), is_over=True)
            events = events[after + 1 :]
        elif found.status == "failed":
            # Its events went with the process that made it. That it failed is what comes next, wherever its reader was.
            events = [encoded_event("response.failed", after + 1, {"response": found.body})]
        elif found.status in RUNNING:
            raise _elsewhere(response_id)
        else:
            message = "`stream` is true: only a response that was made with `stream` or `background` can be streamed"
            raise RequestError(message, param="stream")
        self.tally.streams_resumed += 1
        run = DetachedRun(self.detached, response_id, incoming.owner, survives=True, detail=None)
        run.recording = Recording(events, closed=True)
        return await self.detached.follow(run, receive, response)


def _dialect(run: DetachedRun) -> ResponseDialect:
    assert isinstance(run.detail, ResponseDialect)
    return run.detail


def _stream_wish(query: Any) -> tuple[bool, int]:
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise RequestError(f"`stream` is {stream[:80]!r}: expected true or false", param="stream")
    if after is None:
        return stream == "true", -1
    if not (after.isascii() and after.isdigit() and len(after) <= _MOST_DIGITS):
        raise RequestError(f"`starting_after` is {after[:80]!r}: expected the sequence number of an event", param="starting_after")
    if stream != "true":
        raise RequestError("`starting_after` needs `stream` to be true", param="starting_after")
    return True, int(after)


def _check_after(after: int, count: int, is_over: bool) -> None:
    if after >= count:
        so_far = "" if is_over else " so far"
        raise RequestError(f"`starting_after` is {after}: the stream has events up to {count - 1}{so_far}", param="starting_after")


def _not_found(response_id: str) -> RequestError:
    """The same whether another key has such a response or nobody: ids are not to be guessed."""
    return RequestError(f"there is no response `{response_id[:256]}`", param="id", code="response_not_found", status=404)


def _elsewhere(response_id: str) -> RequestError:
    message = f"response `{response_id[:256]}` is being made by another front end: ask that one, or poll it here until it is over"
    return RequestError(message, param="id", code="response_elsewhere", status=409)


async def _send(response: Response, content: object) -> str:
    await response.send_whole(200, msgspec.json.encode(content))
    return "ok"
