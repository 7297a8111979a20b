"""What a request asks for besides its answer: a session, a worker, KV to be kept, priority. Clients have many spellings for this.

docs/guides/sessions.md says what each spelling means and which takes precedence. The body goes before headers. Everything in the body is
checked; of the headers, only those that are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from penstock.api.auth.keys import Headers
from penstock.api.openai.schema import (
    MAX_SECONDS,
    CacheControl,
    Common,
    Message,
    Nvext,
    NvextCacheControl,
    PromptCacheBreakpoint,
    PromptCacheOptions,
    SessionControl,
)
from penstock.config.front_end import POLICIES, Policy
from penstock.router.policy import Hints, SessionWish
from penstock.wire.errors import RequestError
from penstock.wire.messages import DEFAULT_SESSION_SECONDS

ROUTER_HEADER = b"x-penstock-router"
AFFINITY_HEADER = b"x-session-affinity"
MAX_ID_BYTES = 256

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


_NO_NVEXT = Nvext()


def read_hints(request: Common, headers: Headers) -> Hints:
    """Raises RequestError (400) that names the field or the header, its value, and what is expected."""
    found = dict(headers)
    nvext = request.nvext or _NO_NVEXT
    return Hints(
        session=_session_of_body(nvext.session_control) or _session_of_headers(found),
        affinity=_affinity(request.prompt_cache_key, found),
        retention_seconds=_retention(request, nvext),
        priority=0 if nvext.agent_hints is None else nvext.agent_hints.priority or 0,
        router=_router(found),
        wants_route="route" in (nvext.extra_fields or ()),
        cache_salt=_cache_salt(request.cache_salt, nvext.cache_salt),
    )


def longest_ttl(marks: Iterable[CacheControl | None]) -> float | None:
    """How long Anthropic's marks ask to keep the prompt; 5 minutes if they do not say. None without a mark."""
    return max((_TTL_SECONDS[mark.ttl or "5m"] for mark in marks if mark is not None), default=None)


def longest_breakpoint(options: PromptCacheOptions | None, marks: Iterable[PromptCacheBreakpoint | None]) -> float | None:
    """How long OpenAI's breakpoints ask to keep the prompt; 30 minutes if they do not say. None without any."""
    default = options.ttl if options is not None and options.ttl is not None else "30m"
    ttls = [mark.ttl or default for mark in marks if mark is not None]
    if options is not None and options.mode != "explicit":
        ttls.append(default)
    if options is None and not ttls:
        return None
    return max((_TTL_SECONDS[ttl] for ttl in ttls), default=0.0)


def prompt_text(message: Message) -> str:
    """The text of a message in the prompt. Instructions lose what changes with every call."""
    if message.role not in ("system", "developer"):
        return message.text
    if isinstance(message.content, list):
        return "".join(part.text for part in message.content if not _BILLING_HEADER.match(part.text))
    return without_billing_header(message.text)


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
            return SessionWish(session_id)
        parent = session_id if parent is None else f"{session_id}/{parent}"
        session_id = _checked(names.agent.decode(), f"{session_id}/{agent}")
    return SessionWish(session_id, parent=None if parent == session_id else parent)


def _affinity(prompt_cache_key: str | None, headers: Mapping[bytes, bytes]) -> str | None:
    if prompt_cache_key is not None:
        return _checked("prompt_cache_key", prompt_cache_key)
    return _header(headers, AFFINITY_HEADER)


def _cache_salt(salt: str | None, other: str | None) -> str | None:
    if salt is not None and other is not None and salt != other:
        raise _refused("nvext.cache_salt", other, "expected the same as `cache_salt`, or only one of the two")
    return other if salt is None else salt


def _retention(request: Common, nvext: Nvext) -> float:
    """The first of these counts: nvext, OpenAI's breakpoints, OpenAI's retention, Anthropic's marks."""
    if nvext.retention_seconds is not None:
        return nvext.retention_seconds
    if nvext.cache_control is not None:
        return _nvext_ttl(nvext.cache_control)
    parts = request.parts
    if parts or request.prompt_cache_options is not None:
        breakpoint_ttl = longest_breakpoint(request.prompt_cache_options, (part.prompt_cache_breakpoint for part in parts))
        if breakpoint_ttl is not None:
            return breakpoint_ttl
    if request.prompt_cache_retention is not None:
        return _RETENTION_SECONDS[request.prompt_cache_retention]
    if request.cache_control is None and not parts:
        return 0.0
    return longest_ttl([request.cache_control, *(part.cache_control for part in parts)]) or 0.0


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
