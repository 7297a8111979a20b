"""A request, from its body to the end of its answer: read within limits, decoded, answered, and counted."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from penstock.api.auth.gate import TENANT, announced_length, discard_body, too_large
from penstock.api.auth.keys import Headers, Tenant
from penstock.api.errors import ErrorShape
from penstock.api.models import Models
from penstock.api.openai.schema import CHOICES
from penstock.api.pipeline.admission import Admission
from penstock.api.pipeline.content_encoding import Coding, decode_content, find_coding, find_zstd
from penstock.api.pipeline.json_cost import MIN_BYTES, check_cost, is_quick
from penstock.api.pipeline.response import Response
from penstock.config.front_end import Limits
from penstock.fairness import FairBudget, Share
from penstock.metrics.frontend import FrontEndMetrics
from penstock.stream.mailbox import ReaderLeft
from penstock.text.transcript import Transcripts
from penstock.wire.errors import GenerationFault, RequestError

if TYPE_CHECKING:
    from penstock.api.pipeline.images import PictureReader

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BODY_WAIT_SECONDS = 10.0
MAX_QUERY_BYTES = 8192
# A client with one of these must get its answer: it can send the request again, later or in another form.
_DISCARDED = (415, 429, 503)
_LOCATED = re.compile(r"(?P<problem>.*) - at `(?P<path>\$.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_TOO_LONG = re.compile(r"Expected `(?P<kind>\w+)` of length <= (?P<limit>\d+)")
_COUNTED = {"array": "elements", "object": "members", "str": "characters"}
_MAX_SHOWN = 80
# A larger body stays the buffer into which it was read.
MAX_COPIED_BYTES = 2**20
MAX_TYPED_BYTES = 2**20
"""A longer body is decoded to plain values first. To find the type of an object whose tag comes last, the typed decoder passes over all of
it, and again over each object inside: text of 30 MB took 60 ms."""
_NOT_JSON = (UnicodeDecodeError, msgspec.DecodeError, RecursionError)


def _nothing() -> None:
    pass


async def _next_turn() -> None:
    await asyncio.sleep(0)


async def _take_nothing(size: int) -> None:
    pass


class Incoming(Struct, gc=False):
    """A request whose body has been read, and its tenant. `path` has the parameters of its path, such as an id."""

    body: bytes
    headers: Headers
    tenant: Tenant
    path: Mapping[str, str] = {}
    query: Mapping[str, str] = {}
    release: Callable[[], None] = _nothing
    """Makes room for other bodies."""
    turn: Callable[[], Awaitable[None]] = _next_turn
    """Awaited before work that may hold the event loop for milliseconds. See LoopTurns."""
    take: Callable[[int], Awaitable[None]] = _take_nothing
    """Awaited before more is read into memory: it counts as the body does, until `release`. Raises RequestError (503)."""

    def drop_body(self) -> None:
        """The body has been decoded and its prompt tokenized. An answer may take minutes: it does not hold the body."""
        self.body = b""
        self.release()

    @property
    def owner(self) -> str:
        """Whose sessions and answers it may see."""
        return self.tenant.owner


@dataclass(frozen=True)
class PromptContext:
    """What is needed to turn a request into tokens: the models, the transcripts of sessions, and what reads images. With `drops_images`, a
    model that reads only text gets a note in place of every image."""

    models: Models
    transcripts: Transcripts
    media: PictureReader | None = None
    drops_images: bool = False

    async def read(self, incoming: Incoming, work: Callable[..., T], *arguments: Any) -> T:
        """The result of this call, which reads what the body was decoded to: beside the event loop if the body is long."""
        return await self.transcripts.encoder.read(incoming.tenant.lane, len(incoming.body), work, *arguments)


Answer = Callable[[Incoming, Receive, Response], Awaitable[str]]
"""Answers a request and returns the outcome. May raise RequestError, GenerationFault, ReaderLeft and ClientGone."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(scope: Scope, receive: Receive, limits: Limits, bodies: FairBudget, share: Share) -> bytes:
    """The whole body, as it was sent. It takes its bytes from the budget: all at once if the client says how many, or else as they come.

    Two bodies that each wait for the other's bytes would wait for long.

    Raises RequestError: 413 as soon as it is known to be over the limit, 408 when it takes too long, 503 when there is no room for it.
    """
    limit, seconds = limits.max_body_bytes, limits.stall_seconds
    length = announced_length(scope)
    if length is not None and length > limit:
        raise too_large(limit)
    deadline = _Deadline(seconds)
    try:
        if length and not bodies.take(share, length):
            await _wait_for_room(bodies, share, length, deadline)
        return await _read_chunks(receive, limit, length, deadline, bodies, share)
    except asyncio.CancelledError:
        if deadline.has_passed:
            message = f"the body did not come within {seconds:g} seconds"
            raise RequestError(message, code="request_timeout", status=408) from None
        raise
    finally:
        deadline.timer.cancel()


class _Deadline:
    """Cancels the current task after some seconds. asyncio.timeout costs three times as much, and every request needs one."""

    __slots__ = ("_task", "has_passed", "timer")

    def __init__(self, seconds: float) -> None:
        self._task = asyncio.current_task()
        self.has_passed = False
        self.timer = asyncio.get_running_loop().call_later(seconds, self._pass)

    def _pass(self) -> None:
        if self._task is not None:
            self.has_passed = True
            self._task.cancel()
            self._task.uncancel()


async def _read_chunks(receive: Receive, limit: int, length: int | None, deadline: _Deadline, bodies: FairBudget, share: Share) -> bytes:
    """`length` is what the client says. If the body is complete, the last, empty message is not awaited."""
    # Joining all pieces of a large body at the end would take long.
    body = bytearray()
    size = 0
    # A deadline that passes when a message is just there does not cancel the task from Python 3.13 on.
    while not deadline.has_passed:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        if length is None and chunk and not bodies.take(share, len(chunk)):
            await _wait_for_room(bodies, share, len(chunk), deadline)
        if size == length and not body:
            return bytes(chunk)
        body += chunk
        if size == length or not message.get("more_body", False):
            return _as_body(body)
    raise asyncio.CancelledError


def _as_body(read: bytearray) -> bytes:
    """Only the methods that both types share are used."""
    return bytes(read) if len(read) <= MAX_COPIED_BYTES else cast(bytes, read)


def coding_of(scope: Scope) -> Coding | None:
    """How the body is compressed, if it is. Raises RequestError: 415 for an unknown encoding."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value != b"identity":
            return find_coding(value, find_zstd())
    return None


async def decode_sent(body: bytes, coding: Coding, limits: Limits, bodies: FairBudget, share: Share) -> bytes:
    """What a compressed body decodes to, which takes its bytes from the budget as it grows.

    Raises RequestError: 413 when it is over the limit, 400 when it is broken, 503 when there is no room for it.
    """

    try:
        async with asyncio.timeout(limits.stall_seconds):
            return _as_body(await decode_content(body, coding, limits.max_body_bytes, partial(_take_room, bodies, share)))
    except TimeoutError as error:
        raise _no_room(bodies) from error


async def _take_room(bodies: FairBudget, share: Share, size: int) -> None:
    if not bodies.take(share, size):
        try:
            await bodies.wait(share, size, MAX_BODY_WAIT_SECONDS)
        except TimeoutError as error:
            raise _no_room(bodies) from error


async def _wait_for_room(bodies: FairBudget, share: Share, size: int, deadline: _Deadline) -> None:
    """Meanwhile the client's socket fills up, and it must wait, too. If that takes too long, the client is not to blame."""
    try:
        await bodies.wait(share, size, MAX_BODY_WAIT_SECONDS)
    except (TimeoutError, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and not deadline.has_passed:
            raise
        raise _no_room(bodies) from error


def _no_room(bodies: FairBudget) -> RequestError:
    message = f"the server holds {bodies.used:,} bytes of request bodies; its limit is {bodies.total:,} (--body-memory)"
    return RequestError(message, code="overloaded", status=503, limit="body_memory")


@dataclass(frozen=True)
class Endpoint:
    """Charges a request to its key, reads its body and calls `answer`. Errors have the shape of the request's API.

    Cheap checks come first: size and key in the gate, the rate before the body is read, the number of values before the body is decoded.
    An endpoint is an ASGI application: nothing stands between a stream and the server.
    """

    route: str | None
    """The name of the route in the metric of requests. None: requests are not counted."""
    answer: Answer
    admission: Admission
    metrics: FrontEndMetrics
    errors: Callable[[], ErrorShape]
    """Makes the shape of a request's errors. Some have an id of their own."""
    is_charged: bool = False
    """A request counts against the rate of its key."""
    generates: bool = False
    """It also needs a generation and tokens."""

    @property
    def loop_label(self) -> str:
        return f"route {self.route}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, errors = scope[TENANT], self.errors()
        # The memory of an answer counts for its tenant, unless it holds generations, which are counted already, or is no API route.
        reading = partial(self.admission.reading, None if self.generates or self.route is None else tenant)
        response = Response(send, receive, self.metrics.tally, reading, lambda: [*tenant.quota.headers(), *errors.headers])
        outcome = "failed"
        self.metrics.loop.enter()
        try:
            outcome = await self._answer(scope, receive, response)
        except RequestError as error:
            outcome = f"refused_{error.status}"
            if error.limit is not None:
                self.metrics.tally.limits_reached[error.limit,] += 1
            await response.send_error(*errors.render(error), error.retry_after)
        except GenerationFault as error:
            outcome = "fault"
            await response.send_error(*errors.render(error))
        except ReaderLeft:
            outcome = "client_left"
            self.metrics.tally.clients_left += 1
        except ClientGone:
            outcome = "client_left"
            self.metrics.tally.clients_left += 1
            # The client may still be connected: a body with a broken encoding looks the same.
            await response.send_error(*errors.render(RequestError("the body broke off before its end", code="incomplete_body")))
        except asyncio.CancelledError:
            # Raising leaves the response unfinished: its client cannot mistake it for a complete one.
            outcome = "stalled" if response.stalled else "cancelled"
            raise
        except Exception:
            log.exception("a request failed")
            if not response.started:
                await response.send_error(*errors.render(RequestError("internal error", code="internal_error", status=500)))
            raise
        finally:
            self.metrics.loop.leave()
            if self.route is not None:
                self.metrics.tally.requests[self.route, outcome] += 1

    async def _answer(self, scope: Scope, receive: Receive, response: Response) -> str:
        tenant, bodies = scope[TENANT], self.admission.bodies
        share = Share(tenant.lane, tenant.weight)
        release = partial(bodies.release, share)
        turn = partial(self.admission.loop_turns.take, tenant.lane, tenant.weight)
        take = partial(_take_room, bodies, share)
        incoming = Incoming(b"", scope["headers"], tenant, scope.get("path_params", {}), {}, release, turn, take)
        try:
            try:
                if self.is_charged:
                    tenant.quota.charge(self.generates)
                if scope["query_string"]:
                    incoming.query = _read_query(scope["query_string"])
                coding, limits = coding_of(scope), self.admission.limits
                incoming.body = await read_body(scope, receive, limits, bodies, share)
            except RequestError as error:
                # What is discarded needs no room.
                release()
                if error.status in _DISCARDED:
                    await discard_body(receive)
                raise
            # Here the client has sent everything: there is nothing to discard. Without a body there is nothing to decode.
            if coding is not None and incoming.body:
                incoming.body = await decode_sent(incoming.body, coding, limits, bodies, share)
            self.admission.answering += 1
            try:
                return await self.answer(incoming, receive, response)
            finally:
                self.admission.answering -= 1
        finally:
            release()


def _read_query(query: bytes) -> dict[str, str]:
    """The parameters in a URL. Raises RequestError when it is long: reading 64 KiB takes 40 ms."""
    if len(query) > MAX_QUERY_BYTES:
        message = f"the query of the URL has {len(query):,} bytes: expected at most {MAX_QUERY_BYTES:,}"
        raise RequestError(message, code="too_long", status=414, limit="query_bytes")
    return dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))


async def decode_body(
    body: bytes,
    decoder: msgspec.json.Decoder[T],
    unsupported: frozenset[str],
    choices: Mapping[str, Sequence[str]] = CHOICES,
    turn: Callable[[], Awaitable[None]] = _next_turn,
) -> T:
    """The request. Raises RequestError that names the field, its value and what is expected: `choices` has that, by the field's path.

    Decoding cannot be interrupted, so a body that would take too long is refused.
    """
    is_long = len(body) > MIN_BYTES or not is_quick(body)
    if is_long:
        await check_cost(body, turn)
    try:
        if len(body) > MAX_TYPED_BYTES:
            values = msgspec.json.decode(body)
            await turn()
            request = msgspec.convert(values, decoder.type)
        else:
            request = decoder.decode(body)
    except msgspec.ValidationError as error:
        # Not the error itself: it refers to this frame, and the cycle would keep the body until the garbage collector finds it.
        problem = str(error)
    except _NOT_JSON as error:
        raise _not_json(error) from error
    else:
        if is_long:
            # For what reads the request.
            await turn()
        return request
    # Others go on between these steps: each may take as long as the first.
    if is_long:
        await turn()
    content = _content(body)
    if is_long:
        await turn()
    raise _explain(problem, content, unsupported, choices)


def explain_wrong(body: bytes, wrong: msgspec.ValidationError, choices: Mapping[str, Sequence[str]]) -> RequestError:
    """The error of a short body that a decoder has refused."""
    return _explain(str(wrong), _content(body), frozenset(), choices)


def _content(body: bytes) -> Any:
    """The values of a body with a wrong field. The text after that field was not read yet; if it is not JSON, that is the error."""
    try:
        return msgspec.json.decode(body)
    except _NOT_JSON as error:
        raise _not_json(error) from error


def _not_json(error: Exception) -> RequestError:
    if isinstance(error, UnicodeDecodeError):
        return RequestError("the body has a string that is not valid UTF-8", code="invalid_utf8")
    return RequestError(f"the body is not valid JSON: {error}", code="invalid_json")


def _explain(problem: str, content: Any, unsupported: frozenset[str], choices: Mapping[str, Sequence[str]]) -> RequestError:
    if unknown := _UNKNOWN.match(problem):
        name = _join(unknown["path"], unknown["name"])
        return RequestError(f"unknown field `{name}`", param=name, code="unknown_field")
    if missing := _MISSING.match(problem):
        name = _join(missing["path"], missing["name"])
        return RequestError(f"`{name}` is required", param=name, code="missing_field")
    located = _LOCATED.match(problem)
    if located is None:
        return RequestError(f"the body must be a JSON object: {problem}", code="invalid_type")
    param = located["path"].removeprefix("$").removeprefix(".")
    if refused := next((name for name in (_first(param), param) if name in unsupported), None):
        return RequestError(f"`{refused}` is not supported yet; leave it out", param=refused, code="unsupported_field")
    value, field = _value_at(content, param), re.sub(r"\[.*?\]", "", param)
    if too_long := _TOO_LONG.match(located["problem"]):
        counted = f"{len(value):,} {_COUNTED[too_long['kind']]}: expected at most {int(too_long['limit']):,}"
        return RequestError(f"`{param}` has {counted}", param=param, code="too_long", limit=field)
    expected = located["problem"][:1].lower() + located["problem"][1:]
    if known := choices.get(field):
        # A message of another role may have it.
        expected = f"expected one of {', '.join(each for each in known if each != value)}"
    return RequestError(f"`{param}` is {_shown(value)}: {expected}", param=param, code="invalid_value")


def _first(param: str) -> str:
    return re.split(r"[.\[]", param, maxsplit=1)[0]


def _join(path: str | None, name: str) -> str:
    return f"{path}.{name}" if path else name


def _value_at(value: Any, param: str) -> Any:
    """The value at a path such as `messages[0].role`."""
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", param):
        try:
            value = value[int(index)] if index else value[key]
        except (KeyError, IndexError, TypeError):
            # A path with wildcards (`[...]`) ends at the container.
            break
    return value


def _shown(value: Any) -> str:
    """A value as JSON, cut when it is long."""
    text = msgspec.json.encode(_beginning(value)).decode()
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _beginning(value: Any) -> Any:
    """Enough of a value to show it: encoding all of it may take long."""
    if isinstance(value, dict):
        return dict(islice(value.items(), _MAX_SHOWN))
    return value[: _MAX_SHOWN + 1] if isinstance(value, str | list) else value


def check_query(query: Mapping[str, str], known: Sequence[str]) -> None:
    """Raises RequestError for a parameter that is not known."""
    for name in query:
        if name not in known:
            expected = " or ".join(name for name in known if not name.endswith("[]"))
            raise RequestError(f"unknown parameter `{name[:80]}`: expected {expected}", param=name[:80], code="unknown_field")


def read_limit(query: Mapping[str, str], default: int, maximum: int) -> int:
    """The `limit` of a list. Raises RequestError when it is not a number from 1 to the maximum."""
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(maximum)) and 1 <= int(limit) <= maximum):
        raise RequestError(f"`limit` is {limit[:80]!r}: expected a number from 1 to {maximum}", param="limit")
    return int(limit)
