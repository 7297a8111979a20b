"""What a request asks for besides its answer: a session, a worker, KV to be kept, priority. Clients have many spellings for this.

docs/guides/sessions.md says what each spelling means and which takes precedence. The body goes before headers. Everything in the body is
checked; of the headers, only those that are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.api.auth.keys import Headers
from penstock.api.openai.schema import (
    MAX_SECONDS,
    CacheControl,
    ChatRequest,
    Common,
    Marked,
    Message,
    Nvext,
    NvextCacheControl,
    PromptCacheOptions,
    PromptRequest,
    SessionControl,
)
from penstock.config.front_end import POLICIES, Policy
from penstock.router.policy import Hints, PlacedMark, SessionWish
from penstock.wire.errors import RequestError
from penstock.wire.messages import DEFAULT_SESSION_SECONDS

ROUTER_HEADER = b"x-penstock-router"
AFFINITY_HEADER = b"x-session-affinity"
MAX_ID_BYTES = 256

# OpenAI keeps the last ones of a request, at most this many. An implicit one counts.
MAX_BREAKPOINTS = 4
_INSTRUCTIONS = ("system", "developer")
_TTL_SECONDS = {"5m": 300.0, "30m": 1_800.0, "1h": 3_600.0, "12h": 43_200.0}
_RETENTION_SECONDS = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86_400.0}
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3_600}
_DURATION = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_BILLING_HEADER = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*\n*)+")
_MAX_SHOWN = 80


class SessionHeaders(NamedTuple):
    """The headers with which one kind of client names its sessions. With `agent`, subagents share a session id: their session is both
    ids together, and `parent` is another agent of the same session. Without, `parent` is another session."""

    session: bytes
    agent: bytes | None = None
    parent: bytes | None = None


SESSION_HEADERS = (
    SessionHeaders(b"x-session-id", parent=b"x-parent-session-id"),
    SessionHeaders(b"x-dynamo-session-id", parent=b"x-dynamo-parent-session-id"),
    SessionHeaders(b"x-claude-code-session-id", b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id"),
    # Each subagent of Codex has its own thread within one session.
    SessionHeaders(b"thread-id", parent=b"x-codex-parent-thread-id"),
    SessionHeaders(b"session-id"),
    SessionHeaders(b"session_id"),
    SessionHeaders(b"conversation_id"),
    SessionHeaders(b"x-opencode-session", parent=b"x-parent-session-id"),
)
"""The first one that a request has counts."""
_SESSION_NAMES = frozenset(names.session for names in SESSION_HEADERS)
FINAL_HEADERS = (b"x-session-final", b"x-dynamo-session-final")
"""With any of the above: this turn is the session's last."""
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


_NO_NVEXT = Nvext()


def read_hints(request: Common, headers: Headers) -> Hints:
    """Raises RequestError (400) that names the field or the header, its value, and what is expected."""
    found = dict(headers)
    nvext = request.nvext or _NO_NVEXT
    retention_seconds, marks = _retention(request, nvext)
    return Hints(
        session=_session_of_body(nvext.session_control) or _session_of_headers(found),
        affinity=_affinity(request.prompt_cache_key, found),
        retention_seconds=retention_seconds,
        marks=marks,
        priority=0 if nvext.agent_hints is None else nvext.agent_hints.priority or 0,
        router=_router(found),
        wants_route="route" in (nvext.extra_fields or ()),
        cache_salt=_cache_salt(request.cache_salt, nvext.cache_salt),
    )


def ttl_seconds(control: CacheControl) -> float:
    """How long one of Anthropic's marks asks to keep the prompt."""
    return _TTL_SECONDS[control.ttl or "5m"]


def prompt_text(message: Message) -> str:
    """The text of a message in the prompt. Instructions lose what changes with every call."""
    if message.role not in _INSTRUCTIONS:
        return message.text
    if isinstance(message.content, list):
        return "".join(part.text for part in message.content if not _BILLING_HEADER.match(part.text))
    return without_billing_header(message.text)


def marks_of_chat(request: ChatRequest) -> list[Marked]:
    """The marks on tools, messages and parts."""
    messages = request.messages
    head = next((index for index, message in enumerate(messages) if message.role not in _INSTRUCTIONS), len(messages))
    found = [Marked(head, 0, tool.cache_control) for tool in request.tools or () if tool.cache_control is not None]
    for index, message in enumerate(messages):
        if message.cache_control is None and not isinstance(message.content, list):
            continue
        is_head = message.role in _INSTRUCTIONS and index == head - 1 and bool(request.tools)
        length = len(prompt_text(message))
        # Templates write tools behind the instructions, and a mark behind all of these is for the tools, too.
        found += [
            mark._replace(message=head, characters=0) if is_head and mark.characters == length else mark
            for mark in _marks_of_message(index, message)
        ]
    return found


def _marks_of_message(index: int, message: Message) -> Iterator[Marked]:
    characters = 0
    for part in message.content if isinstance(message.content, list) else ():
        if message.role not in _INSTRUCTIONS or not _BILLING_HEADER.match(part.text):
            characters += len(part.text)
        if part.cache_control is not None or part.prompt_cache_breakpoint is not None:
            yield Marked(index, characters, part.cache_control, part.prompt_cache_breakpoint)
    if message.cache_control is not None:
        yield Marked(index, len(prompt_text(message)), message.cache_control)


def without_billing_header(text: str) -> str:
    """Claude Code starts its instructions with a line that differs on every call. With it, no two prompts would share a prefix. Only
    leading lines are removed."""
    return _BILLING_HEADER.sub("", text)


def _session_of_body(control: SessionControl | None) -> SessionWish | None:
    if control is None:
        return None
    session_id = _checked("nvext.session_control.session_id", control.session_id)
    return SessionWish(session_id, control.action or "continue", control.timeout or DEFAULT_SESSION_SECONDS)


def _session_of_headers(headers: Mapping[bytes, bytes]) -> SessionWish | None:
    if headers.keys().isdisjoint(_SESSION_NAMES):
        return None
    for names in SESSION_HEADERS:
        session_id = _header(headers, names.session)
        if session_id is not None:
            return _named_by(names, session_id, headers)
    return None


def _named_by(names: SessionHeaders, session_id: str, headers: Mapping[bytes, bytes]) -> SessionWish:
    parent = _header(headers, names.parent)
    if names.agent is not None:
        agent = _header(headers, names.agent)
        if agent is None:
            return SessionWish(session_id, is_final=_is_final(headers))
        parent = session_id if parent is None else f"{session_id}/{parent}"
        session_id = _checked(names.agent.decode(), f"{session_id}/{agent}")
    return SessionWish(session_id, parent=None if parent == session_id else parent, is_final=_is_final(headers))


def _is_final(headers: Mapping[bytes, bytes]) -> bool:
    for name in FINAL_HEADERS:
        if name in headers:
            value = headers[name].decode(errors="replace").strip(" \t")
            if value.lower() not in _FLAGS:
                raise _refused(name.decode(), value, f"expected one of {', '.join(_FLAGS)}")
            return _FLAGS[value.lower()]
    return False


def _affinity(prompt_cache_key: str | None, headers: Mapping[bytes, bytes]) -> str | None:
    if prompt_cache_key is not None:
        return _checked("prompt_cache_key", prompt_cache_key)
    return _header(headers, AFFINITY_HEADER)


def _cache_salt(salt: str | None, other: str | None) -> str | None:
    if salt is not None and other is not None and salt != other:
        raise _refused("nvext.cache_salt", other, "expected the same as `cache_salt`, or only one of the two")
    return other if salt is None else salt


def _retention(request: Common, nvext: Nvext) -> tuple[float, tuple[PlacedMark, ...]]:
    """How long prompt and answer are kept, and marks for parts of the prompt.

    The first of these counts: nvext, OpenAI's breakpoints, OpenAI's retention, Anthropic's marks.
    """
    if nvext.retention_seconds is not None:
        return nvext.retention_seconds, (PlacedMark(nvext.retention_seconds),)
    if nvext.cache_control is not None:
        return 0.0, (PlacedMark(_nvext_ttl(nvext.cache_control)),)
    marked: Sequence[Marked] = ()
    if isinstance(request, ChatRequest):
        marked = marks_of_chat(request)
    elif isinstance(request, PromptRequest):
        marked = request.marked
    breakpoints = [mark for mark in marked if mark.breakpoint is not None]
    if breakpoints or request.prompt_cache_options is not None:
        return 0.0, _breakpoints(request.prompt_cache_options, breakpoints)
    if request.prompt_cache_retention is not None:
        seconds = _RETENTION_SECONDS[request.prompt_cache_retention]
        return 0.0, (PlacedMark(seconds),) if seconds else ()
    whole = () if request.cache_control is None else (PlacedMark(ttl_seconds(request.cache_control)),)
    parts = [PlacedMark(ttl_seconds(mark.control), mark.message, mark.characters) for mark in marked if mark.control is not None]
    return 0.0, (*parts, *whole)


def _breakpoints(options: PromptCacheOptions | None, marked: Sequence[Marked]) -> tuple[PlacedMark, ...]:
    """OpenAI's breakpoints: 30 minutes if they do not say."""
    default = options.ttl if options is not None and options.ttl is not None else "30m"
    placed = [
        PlacedMark(_TTL_SECONDS[(mark.breakpoint and mark.breakpoint.ttl) or default], mark.message, mark.characters) for mark in marked
    ]
    if options is None or options.mode == "explicit":
        return tuple(placed[-MAX_BREAKPOINTS:])
    return (*placed[1 - MAX_BREAKPOINTS :], PlacedMark(_TTL_SECONDS[default]))


def _nvext_ttl(control: NvextCacheControl) -> float:
    ttl = _seconds("nvext.cache_control.ttl", control.ttl) if isinstance(control.ttl, str) else control.ttl
    return control.retention_seconds or ttl or _TTL_SECONDS["5m"]


def _seconds(name: str, text: str) -> float:
    duration = _DURATION.fullmatch(text)
    seconds = float(duration[1]) * _UNIT_SECONDS[duration[2]] if duration else 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise _refused(name, text, f"expected seconds, or a time such as 90s, 5m or 1h; up to {MAX_SECONDS:,} seconds")
    return seconds


def _router(headers: Mapping[bytes, bytes]) -> Policy | None:
    if ROUTER_HEADER not in headers:
        return None
    value = headers[ROUTER_HEADER].decode(errors="replace").strip()
    for name in POLICIES:
        if value == name:
            return name
    raise _refused(ROUTER_HEADER.decode(), value, f"expected one of {', '.join(POLICIES)}")


def _header(headers: Mapping[bytes, bytes], name: bytes | None) -> str | None:
    if name is None or name not in headers:
        return None
    try:
        return _checked(name.decode(), headers[name].decode().strip(" \t"))
    except UnicodeDecodeError as error:
        raise _refused(name.decode(), headers[name].decode(errors="replace"), "expected UTF-8") from error


def _checked(name: str, value: str) -> str:
    """An id that can be logged, can be part of a path, and is short enough to keep thousands of them."""
    if not 0 < len(value.encode()) <= MAX_ID_BYTES or _CONTROL_CHARACTER.search(value):
        raise _refused(name, value, f"expected 1 to {MAX_ID_BYTES} bytes of UTF-8 without control characters")
    return value


def _refused(name: str, value: str, expected: str) -> RequestError:
    shown = msgspec.json.encode(value[:_MAX_SHOWN]).decode() + ("…" if len(value) > _MAX_SHOWN else "")
    return RequestError(f"`{name}` is {shown}: {expected}", param=name)
