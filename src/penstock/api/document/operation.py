"""How the API's document tells of a route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.api.openai import answers
from penstock.api.pipeline.hints import AFFINITY_HEADER, MAX_ID_BYTES, ROUTER_HEADER, SESSION_HEADERS
from penstock.config.front_end import POLICIES

EXAMPLE_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Parameter:
    """What a route reads beside its body."""

    name: str
    place: Literal["path", "query", "header"]
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path.

    `answer` is what a 200 has as JSON, `event` what each event of a stream has, `media_type` what it is where it is neither. `errors` are
    its statuses beyond 401. `example` is a body that can be sent as it is.
    `elements` names lists of the body whose elements are read one by one, and what they may be.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    tag: str
    summary: str
    description: str = ""
    body: Any = None
    answer: Any = None
    event: Any = None
    media_type: str | None = None
    parameters: Sequence[Parameter] = ()
    errors: Sequence[int] = ()
    error: Any = answers.Error
    example: Mapping[str, Any] | None = None
    elements: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    needs_key: bool = True

    @property
    def name(self) -> str:
        """Unique among all operations."""
        words = [word for word in self.path.replace("{", "by_").replace("}", "").replace(".", "_").split("/") if word]
        return "_".join([self.method.lower(), *words])


def path_id(description: str) -> Parameter:
    """An id in the path."""
    return Parameter("id", "path", description, {"type": "string", "minLength": 1})


_ID = {"type": "string", "minLength": 1, "maxLength": MAX_ID_BYTES}
HINTS = (
    Parameter(SESSION_HEADERS[0].session.decode(), "header", "The session that the request is a turn of.", _ID),
    Parameter(AFFINITY_HEADER.decode(), "header", "Go where this key went before. A session counts more.", _ID),
    Parameter(ROUTER_HEADER.decode(), "header", "How the worker of this request is chosen.", {"type": "string", "enum": list(POLICIES)}),
)
"""The headers that every route reads which generates."""

READS = (400, 404, 408, 413, 503)
"""What may be wrong where a body is read, and a model is found by its name."""

GENERATES = (*READS, 429)
