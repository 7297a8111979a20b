"""Errors in Anthropic's shape, and which status each has."""

from __future__ import annotations

import re
import uuid
from typing import Any

import msgspec

from penstock.api.anthropic.answers import AnthropicError
from penstock.api.errors import fault_field, fault_status
from penstock.wire.errors import GenerationFault, RequestError
from penstock.wire.messages import Fault

OVERLOADED = 529
"""Anthropic's status for a server that is overloaded or has no worker: clients try again later."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
# These are not caused by one client, although other APIs answer 429.
_OVERLOAD_CODES = {"overloaded", "queue_full"}
_CONTEXT_EXCEEDED = re.compile(r"maximum context length is (?P<context>\d+) tokens\. However, [^.]*?(?P<tokens>\d+) (?:input )?tokens")
_INDEX = re.compile(r"\[(\d+)\]")


class AnthropicErrors:
    """Anthropic's errors, for one request. Clients look for some sentences, such as `prompt is too long`."""

    answer: Any = AnthropicError

    def __init__(self) -> None:
        self._request_id = f"req_{uuid.uuid4().hex}"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"request-id", self._request_id.encode())]

    def render(self, error: RequestError | GenerationFault) -> tuple[int, bytes]:
        if isinstance(error, GenerationFault):
            status, content = _fault_status(error.fault), fault_content(error.fault, error.grammar_field)
        else:
            status = _status(error.status, error.code)
            content = {"type": _kind(status), "message": _message(error)}
        return status, msgspec.json.encode({"type": "error", "error": content, "request_id": self._request_id})


def fault_content(fault: Fault, grammar_field: str | None) -> dict[str, str]:
    """The content of the error for a fault. `grammar_field` is the field of the request's grammar."""
    field = fault_field(fault, grammar_field)
    message = fault.message if field is None else f"`{field}`: {fault.message}"
    if fault.code == "context_length_exceeded":
        message = _too_long(message)
    return {"type": _kind(_fault_status(fault)), "message": message}


def _fault_status(fault: Fault) -> int:
    return _status(fault_status(fault), fault.code)


def _status(status: int, code: str) -> int:
    return OVERLOADED if status == 503 or code in _OVERLOAD_CODES else status


def _kind(status: int) -> str:
    return _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")


def _message(error: RequestError) -> str:
    path = None if error.param is None else _INDEX.sub(r".\1", error.param)
    if error.code == "unknown_field":
        return f"{path}: Extra inputs are not permitted"
    if error.code == "missing_field":
        return f"{path}: Field required"
    if error.code == "context_length_exceeded":
        return _too_long(error.message)
    return error.message


def _too_long(message: str) -> str:
    """In Anthropic's words, from OpenAI's: Claude Code reads both numbers and leaves out at least their difference."""
    found = _CONTEXT_EXCEEDED.search(message)
    if found is None:
        return f"prompt is too long: {message}"
    context, tokens = int(found["context"]), int(found["tokens"])
    # A prompt that fills the context leaves no room for an answer.
    return f"prompt is too long: {tokens} tokens > {min(context, tokens - 1)} maximum"
