"""The OpenAPI document: made from the route table and the types of its bodies and answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import cleandoc
from typing import Any, cast

import msgspec

from penstock import __version__
from penstock.api.document.route import Route

_JSON = "application/json"
_EVENTS = "text/event-stream"
_REFERENCE = "#/components/schemas/"
_DESCRIPTION = """The OpenAI and Anthropic APIs over HTTP, with extensions.

A wrong request gets an error whose `error.message` names the field, its value and what is expected. Unknown fields are errors,
except in answers that a client sends back. Every GET that does not stream also takes HEAD. A server without API keys accepts every request.
"""
_ERRORS = {
    400: "The request is wrong.",
    401: "The API key is missing or unknown.",
    403: "On a server without API keys: the host's name or the web page's origin is not allowed.",
    404: "Not found.",
    408: "The body did not arrive in time.",
    409: "Its current state does not allow this.",
    413: "The body is too large.",
    415: "The body has an unknown encoding; or, on a server without API keys, its content type is not JSON.",
    429: "Too many requests: try again later.",
    503: "No worker is available: try again later.",
    507: "The store is full.",
    529: "The server is overloaded or has no worker: try again later.",
}
_RETRY_AFTER = {"Retry-After": {"description": "Try again after this many seconds.", "schema": {"type": "integer", "minimum": 1}}}
_RETRYABLE = (429, 503, 529)

Document = dict[str, Any]


def make_document(routes: Iterable[Route]) -> Document:
    """An OpenAPI 3.1 document of these routes."""
    listed = list(routes)
    types = list(dict.fromkeys(kind for route in listed for kind in _types(route)))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE + "{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    for schema in components.values():
        if "description" in schema:
            schema["description"] = cleandoc(schema["description"])
    paths: dict[str, Document] = {}
    for route in listed:
        _describe_elements(route, schema_of, components)
        paths.setdefault(route.documented_path, {})[route.method.lower()] = _operation(route, schema_of)
    return _with_short_names(
        {
            "openapi": "3.1.0",
            "info": {"title": "Penstock", "version": __version__, "description": _DESCRIPTION},
            "servers": [{"url": "/"}],
            "security": [{"bearer": []}, {"key": []}, {}],
            "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in listed)],
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )


def _with_short_names(document: Document) -> Document:
    """msgspec names two types of the same name by their modules. Here they are named by their packages."""
    schemas = document["components"]["schemas"]
    renamed = {_REFERENCE + name: _REFERENCE + _short(name) for name in schemas}
    document["components"]["schemas"] = {_short(name): schema for name, schema in schemas.items()}

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rename(member) for key, member in value.items()}
        if isinstance(value, list):
            return [rename(member) for member in value]
        return renamed.get(value, value) if isinstance(value, str) else value

    return cast(Document, rename(document))


def _short(name: str) -> str:
    if "." not in name:
        return name
    package, _, kind = name.split(".")[-3:]
    return f"{package}.{kind}"


def _types(route: Route) -> list[Any]:
    elements = [kind for kinds in route.elements.values() for kind in kinds]
    return [kind for kind in (route.body, *_answers(route), route.event, _failure(route), *elements) if kind is not None]


def _answers(route: Route) -> tuple[Any, ...]:
    return route.answer if isinstance(route.answer, tuple) else (route.answer,)


def _failure(route: Route) -> Any:
    return route.failure or route.shape().answer


def _describe_elements(route: Route, schema_of: Mapping[Any, Document], components: Document) -> None:
    """Says which types the elements of a list have, where the body's decoder takes any object."""
    for name, kinds in route.elements.items():
        owner, _, member = name.rpartition(".")
        field = components[owner or route.body.__name__]["properties"][member]
        (array,) = [one for one in field.get("anyOf", [field]) if one.get("type") == "array"]
        array["items"] = {"anyOf": [schema_of[kind] for kind in kinds]}


def _operation(route: Route, schema_of: Mapping[Any, Document]) -> Document:
    described: Document = {
        "operationId": route.name,
        "tags": [route.tag],
        "summary": route.summary,
        "responses": _responses(route, schema_of),
    }
    if route.description:
        described["description"] = route.description
    if route.all_parameters:
        described["parameters"] = [
            {"name": name, "in": place, "description": description, "required": place == "path", "schema": schema}
            for name, place, description, schema in route.all_parameters
        ]
    if route.body is not None:
        content = {"schema": schema_of[route.body]} | ({} if route.example is None else {"example": route.example})
        described["requestBody"] = {"required": True, "content": {_JSON: content}}
    if not route.needs_key:
        described["security"] = []
    return described


def _responses(route: Route, schema_of: Mapping[Any, Document]) -> Document:
    statuses = {*route.errors, 403, *([401] if route.needs_key else []), *([429] if route.is_charged else [])}
    statuses |= {415} if route.body is not None else set()
    responses = {"200": {"description": "Success.", "content": _content(route, schema_of)}}
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {_JSON: {"schema": schema_of[_failure(route)]}},
            **({"headers": _RETRY_AFTER} if status in _RETRYABLE else {}),
        }
    return responses


def _content(route: Route, schema_of: Mapping[Any, Document]) -> Document:
    content: Document = {}
    if route.answer is not None:
        schemas = [schema_of[kind] for kind in _answers(route)]
        content[_JSON] = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
    if route.event is not None:
        # OpenAPI cannot describe the events of a stream. `x-event` has the schema of each event's data.
        content[_EVENTS] = {"x-event": schema_of[route.event]}
    if route.media_type is not None:
        content[route.media_type] = {"schema": {} if route.media_type == _JSON else {"type": "string"}}
    return content
