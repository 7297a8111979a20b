"""Errors in OpenAI's shape, and which status each has."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

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
    "queue_full": 429,
    "overloaded": 503,
    "no_worker": 503,
    "draining": 503,
    "worker_lost": 503,
    "engine_failed": 503,
    "engine_aborted": 503,
    "engine_lost": 503,
    "grammar_queue": 503,
    "shutting_down": 503,
}
_FAULTS_OF_A_GRAMMAR = {"invalid_grammar", "unsupported"}
_RETRY_AFTER = {429: b"1", 503: b"1", 529: b"1"}


class ErrorShape(Protocol):
    """How an API tells what went wrong."""

    def fresh(self) -> ErrorShape:
        """The same, for one more request: with an id of its own, where the API has ids."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What every answer to this request has, be it an error or not."""

    def request_status(self, error: RequestError) -> int: ...

    def fault_status(self, error: GenerationFault) -> int: ...

    def of_request(self, error: RequestError) -> bytes: ...

    def of_fault(self, error: GenerationFault) -> bytes: ...


class OpenAIErrors:
    """The shape of OpenAI's errors."""

    headers: list[tuple[bytes, bytes]] = []  # noqa: RUF012, never changed

    def fresh(self) -> OpenAIErrors:
        return self

    def request_status(self, error: RequestError) -> int:
        return error.status

    def fault_status(self, error: GenerationFault) -> int:
        return fault_status(error.fault)

    def of_request(self, error: RequestError) -> bytes:
        return request_error_body(error)

    def of_fault(self, error: GenerationFault) -> bytes:
        return fault_body(error.fault, error.grammar_field)


def error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def request_error_body(error: RequestError) -> bytes:
    return error_body(error.message, _kind(error.status), error.param, error.code)


def fault_body(fault: Fault, grammar_field: str | None = None) -> bytes:
    """`grammar_field` is where the request has its grammar: a worker that refuses the grammar does not know."""
    return error_body(fault.message, _kind(fault_status(fault)), fault_field(fault, grammar_field), fault.code)


def fault_field(fault: Fault, grammar_field: str | None) -> str | None:
    """The field that a fault is about, where it is about one."""
    return grammar_field if fault.code in _FAULTS_OF_A_GRAMMAR else None


def fault_status(fault: Fault) -> int:
    return _STATUS_OF_FAULT.get(fault.code, 500)


def error_headers(status: int, retry_after: float | None = None) -> list[tuple[bytes, bytes]]:
    """`retry_after` is in seconds, where it is known; HTTP has whole ones."""
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
