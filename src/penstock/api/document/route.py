"""How a route is declared: once, for the application and for its document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from starlette.convertors import PathConvertor
from starlette.routing import compile_path

from penstock.api.errors import ErrorShape, OpenAIErrors
from penstock.api.pipeline.hints import AFFINITY_HEADER, MAX_ID_BYTES, ROUTER_HEADER, SESSION_HEADERS
from penstock.api.pipeline.request import Answer, Incoming
from penstock.config.front_end import POLICIES

if TYPE_CHECKING:
    from penstock.api.app import Services

EXAMPLE_MODEL = "SmolLM2-135M-Instruct"

Method = Literal["GET", "POST", "DELETE"]

Handler = Callable[["Services", Incoming], Awaitable[Any]]
"""Returns the struct that its route declares as `answer`, or a `Content`. May raise RequestError."""


class Content(NamedTuple):
    """An answer that is already encoded, or has another status than 200."""

    body: bytes
    media_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = {}


class Parameter(NamedTuple):
    """A value that a route reads from its path, its query or a header."""

    name: str
    place: Literal["path", "query", "header"]
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class Route:
    """One method of one path: the function that answers it, and what the document says about it.

    Exactly one of `handler` and `stream` is set. A `handler` returns its answer. A `stream`, made when the application starts, writes to
    the connection itself. `metric` names the route in the metric of requests; without it, requests are not counted.

    `answer` is the type of the JSON of a 200, or a tuple of such types; `event` is the type of each event of a stream; `media_type` is the
    media type of any other body. `errors` are the statuses besides 401 and 403, and besides 415 and 429 where there is a body. `failure` is
    the type of an error's body, if it is not the API's error. `example` is a body that can be sent as it is. `elements` has the types of
    the elements of some lists, for which the decoder of the body takes any object.
    """

    method: Method
    path: str
    tag: str
    summary: str
    _: KW_ONLY
    description: str = ""
    handler: Handler | None = None
    stream: Callable[[Services], Answer] | None = None
    metric: str | None = None
    body: Any = None
    answer: Any = None
    event: Any = None
    media_type: str | None = None
    parameters: Sequence[Parameter] = ()
    errors: Sequence[int] = ()
    shape: Callable[[], ErrorShape] = OpenAIErrors
    failure: Any = None
    example: Mapping[str, Any] | None = None
    elements: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    needs_key: bool = True

    @property
    def is_charged(self) -> bool:
        """A request counts against the rate of its key: it has a body that is decoded."""
        return self.body is not None

    @property
    def documented_path(self) -> str:
        """The path with plain names in its braces: `{id}`, not `{id:path}`."""
        return compile_path(self.path)[1]

    @property
    def all_parameters(self) -> list[Parameter]:
        """Those of the path, and `parameters`."""
        _, _, convertors = compile_path(self.path)
        slashes = " It may contain slashes."
        schema = {"type": "string", "minLength": 1}
        ids = [Parameter(name, "path", f"The id.{slashes * isinstance(kind, PathConvertor)}", schema) for name, kind in convertors.items()]
        return [*ids, *self.parameters]

    @property
    def name(self) -> str:
        """Unique among all routes."""
        words = [word for word in self.documented_path.replace("{", "by_").replace("}", "").replace(".", "_").split("/") if word]
        return "_".join([self.method.lower(), *words])


def limit_parameter(default: int, maximum: int) -> Parameter:
    """The size of a page of a list."""
    schema = {"type": "integer", "minimum": 1, "maximum": maximum, "default": default}
    return Parameter("limit", "query", "The maximum number of elements to return.", schema)


_ID = {"type": "string", "minLength": 1, "maxLength": MAX_ID_BYTES}
HINTS = (
    Parameter(SESSION_HEADERS[0].session.decode(), "header", "The session that this request is a turn of.", _ID),
    Parameter(AFFINITY_HEADER.decode(), "header", "Prefer the worker that served this key before. A session has precedence.", _ID),
    Parameter(
        ROUTER_HEADER.decode(), "header", "The rule that chooses the worker of this request.", {"type": "string", "enum": list(POLICIES)}
    ),
)
"""The headers that every generating route reads."""

READS = (400, 404, 408, 413, 503)
"""The errors of a route that reads a body and finds a model by name."""
