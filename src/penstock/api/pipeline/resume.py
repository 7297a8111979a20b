"""GET /v1/chat/completions/{id} and /v1/completions/{id}: the rest of a stream, for a client that was cut off."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Receive

from penstock.api.pipeline.detached import DetachedRuns
from penstock.api.pipeline.incoming import Incoming
from penstock.api.pipeline.response import Response
from penstock.metrics.frontend import Tally
from penstock.wire.errors import RequestError

LAST_EVENT_ID = b"last-event-id"


@dataclass(frozen=True)
class Resume:
    """Sends the events of a resumable stream behind the one that `Last-Event-ID` names, and goes on live."""

    detached: DetachedRuns
    tally: Tally

    async def __call__(self, incoming: Incoming, receive: Receive, response: Response) -> str:
        stream_id = incoming.path["id"]
        after = _last_event(incoming)
        run = self.detached.find(incoming.owner, stream_id)
        if run is None:
            # The same whether another key has such a stream or nobody: ids are not to be guessed.
            message = f"there is no stream `{stream_id[:256]}` to resume: it is over for too long, or was not `stream_options.resumable`"
            raise RequestError(message, param="id", code="stream_not_found", status=404)
        if after >= len(run.recording.events):
            message = f"`Last-Event-ID` is {after}: the stream has events up to {len(run.recording.events) - 1}"
            raise RequestError(message, param="Last-Event-ID")
        self.tally.streams_resumed += 1
        return await self.detached.follow(run, receive, response, after)


def _last_event(incoming: Incoming) -> int:
    """The number of the last event that the client has; -1 for none."""
    value = dict(incoming.headers).get(LAST_EVENT_ID, b"").strip()
    if not value:
        return -1
    if not value.isdigit() or len(value) > 15:
        shown = value[:80].decode(errors="replace")
        raise RequestError(f"`Last-Event-ID` is {shown!r}: expected the id of an event of this stream", param="Last-Event-ID")
    return int(value)
