"""Errors in OpenAI's shape, and the HTTP status of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from penstock.api.openai.answers import Error, ErrorDetails
from penstock.wire.errors import GenerationFault, RequestError
from penstock.wire.messages import Fault

_STATUS_OF_FAULT = {
    "kv_too_small": 400,
    "context_length_exceeded": 400,
    "empty_prompt": 400,
    "invalid_sampling": 400,
    "invalid_token": 400,
    "invalid_grammar": 400,
    "unsupported": 400,
    "engine_refused": 400,
    # Not 5xx: clients would send it again, and kill two more workers.
    "kills_workers": 422,
    "queue_full": 429,
    "overloaded": 503,
    "no_worker": 503,
    "draining": 503,
    "worker_lost": 503,
    "engine_failed": 503,
    "out_of_memory": 503,
    "engine_aborted": 503,
    "engine_lost": 503,
    "grammar_queue": 503,
    "shutting_down": 503,
    "cancelled": 503,
}
_GRAMMAR_FAULTS = {"invalid_grammar", "unsupported"}
_RETRY_AFTER = {429: b"1", 503: b"1", 529: b"1"}


class ErrorShape(Protocol):
    """How an API reports errors. `answer` is the struct of an error's body."""

    answer: Any

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of every answer to this request, error or not."""

    def render(self, error: RequestError | GenerationFault) -> tuple[int, bytes]:
        """The status and the body."""


class OpenAIErrors:
    """OpenAI's errors."""

    answer: Any = Error
    headers: list[tuple[bytes, bytes]] = []  # noqa: RUF012, never changed

    def render(self, error: RequestError | GenerationFault) -> tuple[int, bytes]:
        if isinstance(error, GenerationFault):
            return fault_status(error.fault), fault_body(error.fault, error.grammar_field)
        return error.status, error_body(error.message, _kind(error.status), error.param, error.code)


def refusal(error: RequestError, errors: ErrorShape, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to a request that reaches no endpoint."""
    status, body = errors.render(error)
    known = {name.decode(): value.decode() for name, value in [*error_headers(status, error.retry_after), *errors.headers]}
    return Response(body, status, {**known, **(headers or {})})


def error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    return msgspec.json.encode(Error(ErrorDetails(message, kind, param, code)))


def fault_body(fault: Fault, grammar_field: str | None = None) -> bytes:
    """`grammar_field` is the field of the request that has the grammar; the worker does not know it."""
    return error_body(fault.message, _kind(fault_status(fault)), fault_field(fault, grammar_field), fault.code)


def fault_field(fault: Fault, grammar_field: str | None) -> str | None:
    """The field of the request that caused a fault, if known."""
    return grammar_field if fault.code in _GRAMMAR_FAULTS else None


def fault_status(fault: Fault) -> int:
    return _STATUS_OF_FAULT.get(fault.code, 500)


def error_headers(status: int, retry_after: float | None = None) -> list[tuple[bytes, bytes]]:
    """`retry_after` is in seconds; the header rounds it up to whole ones."""
    headers = [(b"content-type", b"application/json")]
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after))))
    elif status in _RETRY_AFTER:
        headers.append((b"retry-after", _RETRY_AFTER[status]))
    return headers


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
