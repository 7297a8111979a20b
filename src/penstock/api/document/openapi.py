"""The API's OpenAPI document, made of the table of its operations and the types that their bodies are decoded into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from penstock import __version__
from penstock.api.document.operation import Operation

_JSON = "application/json"
_EVENTS = "text/event-stream"
_REFERENCE = "#/components/schemas/"
_PACKAGES = {"api": "openai"}
_DESCRIPTION = """OpenAI's API over HTTP, and what goes beyond it.

What is wrong with a request is said in its answer: `error.message` names the field, its value and what would be right. Unknown fields are
refused. Whatever can be asked with GET can be asked with HEAD. Where no API keys were given to the server, none is needed.
"""
_ERRORS = {
    400: "Something in the request is wrong.",
    401: "An API key is needed, or this one is not known.",
    404: "There is no such thing.",
    405: "The path does not take this method.",
    408: "The body did not come in time.",
    409: "It is not in a state in which this can be done.",
    413: "The body is too large.",
    429: "Too much at once: try again later.",
    503: "No worker can take it now: try again later.",
    529: "Too much at once, or no worker: try again later.",
}
_RETRY_AFTER = {"Retry-After": {"description": "In how many seconds to try again.", "schema": {"type": "integer", "minimum": 1}}}
_TRIES_AGAIN = (429, 503, 529)

Document = dict[str, Any]


def make_document(operations: Iterable[Operation]) -> Document:
    """An OpenAPI 3.1 document of these operations."""
    listed = list(operations)
    types = list(dict.fromkeys(kind for operation in listed for kind in _types(operation)))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE + "{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    for operation in listed:
        _refine(operation, schema_of, components)
    paths: dict[str, Document] = {}
    for operation in listed:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, schema_of)
    return _with_short_names(
        {
            "openapi": "3.1.0",
            "info": {"title": "Penstock", "version": __version__, "description": _DESCRIPTION},
            "servers": [{"url": "/"}],
            "security": [{"bearer": []}, {"key": []}, {}],
            "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for operation in listed)],
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
    """Types whose name another has, too, are named by their modules: here by what these are about."""
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
    return f"{_PACKAGES.get(package, package)}.{kind}"


def _types(operation: Operation) -> list[Any]:
    elements = [kind for kinds in operation.elements.values() for kind in kinds]
    return [kind for kind in (operation.body, operation.answer, operation.event, operation.error, *elements) if kind is not None]


def _refine(operation: Operation, schema_of: Mapping[Any, Document], components: Document) -> None:
    """Says what the elements of lists may be that are only objects to the decoder of the whole body."""
    for name, kinds in operation.elements.items():
        field = components[operation.body.__name__]["properties"][name]
        (array,) = [one for one in field.get("anyOf", [field]) if one.get("type") == "array"]
        array["items"] = {"anyOf": [schema_of[kind] for kind in kinds]}


def _described(operation: Operation, schema_of: Mapping[Any, Document]) -> Document:
    described: Document = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": _responses(operation, schema_of),
    }
    if operation.description:
        described["description"] = operation.description
    if operation.parameters:
        described["parameters"] = [
            {
                "name": parameter.name,
                "in": parameter.place,
                "description": parameter.description,
                "required": parameter.place == "path",
                "schema": parameter.schema,
            }
            for parameter in operation.parameters
        ]
    if operation.body is not None:
        content = {"schema": schema_of[operation.body]} | ({} if operation.example is None else {"example": operation.example})
        described["requestBody"] = {"required": True, "content": {_JSON: content}}
    if not operation.needs_key:
        described["security"] = []
    return described


def _responses(operation: Operation, schema_of: Mapping[Any, Document]) -> Document:
    statuses = [*operation.errors, *([401] if operation.needs_key else [])]
    responses = {"200": {"description": "It worked.", "content": _content(operation, schema_of)}}
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {_JSON: {"schema": schema_of[operation.error]}},
            **({"headers": _RETRY_AFTER} if status in _TRIES_AGAIN else {}),
        }
    return responses


def _content(operation: Operation, schema_of: Mapping[Any, Document]) -> Document:
    content: Document = {}
    if operation.answer is not None:
        content[_JSON] = {"schema": schema_of[operation.answer]}
    if operation.event is not None:
        # There is no way to say it of the events of a stream: what the data of each is stands in a member of our own.
        content[_EVENTS] = {"x-event": schema_of[operation.event]}
    if operation.media_type is not None:
        content[operation.media_type] = {"schema": {} if operation.media_type == _JSON else {"type": "string"}}
    return content
