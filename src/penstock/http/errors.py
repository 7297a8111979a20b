"""Errors in OpenAI's shape, and which status each has."""

from __future__ import annotations

import msgspec

from penstock.wire.errors import RequestError
from penstock.wire.messages import Fault

_STATUS_OF_FAULT = {
    "kv_too_small": 400,
    "context_length_exceeded": 400,
    "empty_prompt": 400,
    "invalid_sampling": 400,
    "invalid_token": 400,
    "invalid_grammar": 400,
    "unsupported": 400,
    "queue_full": 429,
    "no_worker": 503,
    "draining": 503,
    "worker_lost": 503,
    "engine_failed": 503,
    "grammar_queue": 503,
    "shutting_down": 503,
}
_FAULTS_OF_A_GRAMMAR = {"invalid_grammar", "unsupported"}
_RETRY_AFTER = {429: b"1", 503: b"1"}


def error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def request_error_body(error: RequestError) -> bytes:
    return error_body(error.message, _kind(error.status), error.param, error.code)


def fault_body(fault: Fault, grammar_field: str | None = None) -> bytes:
    """`grammar_field` is where the request has its grammar: a worker that refuses the grammar does not know."""
    param = grammar_field if fault.code in _FAULTS_OF_A_GRAMMAR else None
    return error_body(fault.message, _kind(fault_status(fault)), param, fault.code)


def fault_status(fault: Fault) -> int:
    return _STATUS_OF_FAULT.get(fault.code, 500)


def error_headers(status: int) -> list[tuple[bytes, bytes]]:
    headers = [(b"content-type", b"application/json")]
    if status in _RETRY_AFTER:
        headers.append((b"retry-after", _RETRY_AFTER[status]))
    return headers


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
