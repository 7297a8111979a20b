"""SGLang over HTTP: `/generate` with token ids. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.backends.external.engine import Chunk, EngineRequest
from penstock.backends.http.dialects import BaseReader, Body, Reader, lost, raise_error, unsupported
from penstock.backends.sglang.chunks import ChunkReader
from penstock.backends.sglang.requests import as_parameters


@dataclass(frozen=True)
class SglangTraits:
    """How a server was started: whether each event has the new tokens only, and which of its abilities are switched on."""

    is_incremental: bool
    has_grammar: bool = False
    has_sessions: bool = False
    has_priority: bool = False
    is_disaggregated: bool = False


class SglangDialect:
    """See `http_dialects.Dialect`."""

    path = "/generate"

    def __init__(self, traits: SglangTraits) -> None:
        self._traits = traits

    def body(self, request: EngineRequest) -> Body:
        if request.bootstrap is not None and not self._traits.is_disaggregated:
            raise unsupported("prefill and decode apart from each other: the server was not started for it")
        if request.lark is not None and not self._traits.has_grammar:
            raise unsupported("a grammar: SGLang must be started with --grammar-backend llguidance")
        body = as_parameters(request, None, tags_sessions=self._traits.has_sessions, has_priority=self._traits.has_priority)
        return body | {"stream": not request.prompt_logprobs}

    def reader(self, request: EngineRequest) -> Reader:
        return _SglangReader(request, self._traits.is_incremental)

    def abort(self, request_id: str) -> tuple[str, Body] | None:
        return "/abort_request", {"rid": request_id}


class _SglangReader(BaseReader):
    def __init__(self, request: EngineRequest, is_incremental: bool) -> None:
        super().__init__(request)
        # An answer that comes whole is read right either way.
        self._chunks = ChunkReader(request, is_incremental=is_incremental)

    def read(self, event: bytes) -> Chunk | None:
        try:
            told: dict[str, Any] = msgspec.json.decode(event, type=dict)
            if (error := told.get("error")) is not None:
                raise_error(error)
            self.is_over = told["meta_info"]["finish_reason"] is not None
            chunk = self._chunks.read(told)
        except (ValueError, RecursionError, AssertionError, AttributeError, IndexError, KeyError, TypeError) as error:
            raise lost(f"an event of SGLang's cannot be read: {type(error).__name__}: {error}") from error
        return self._hold_last(chunk)
