"""GET /openapi.json and /docs: the API's document, as JSON and as a page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from html import escape
from typing import Any

import msgspec

from penstock.api.document.openapi import Document, make_document
from penstock.api.document.route import Content, Route

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --accent: light-dark(#0b5cad, #7cb7ff); }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1rem 1.5rem 4rem; }
code, pre { font: 0.9em/1.45 ui-monospace, monospace; }
pre { background: var(--soft); border-radius: 6px; overflow-x: auto; padding: 0.7rem 1rem; }
a { color: var(--accent); }
h2 { border-bottom: 1px solid var(--line); margin-top: 3rem; }
h3 { margin: 2rem 0 0.3rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
td, th { border-bottom: 1px solid var(--line); padding: 0.3rem 0.6rem 0.3rem 0; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
summary { cursor: pointer; }
ul { columns: 20rem; list-style: none; padding: 0; }
.method { background: var(--soft); border-radius: 4px; padding: 0.1rem 0.4rem; }
.note { opacity: 0.75; }
"""
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "pattern": "matches {}",
    "minItems": "at least {} elements",
    "maxItems": "at most {} elements",
    "minProperties": "at least {} members",
    "maxProperties": "at most {} members",
}
_REFERENCE = "#/components/schemas/"


class ApiDocument:
    """The document of some routes, as JSON and as a page. Each is made on first use."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = tuple(routes)

    @cached_property
    def openapi(self) -> Content:
        return Content(msgspec.json.encode(self._content))

    @cached_property
    def page(self) -> Content:
        # The headers let a browser load and run nothing but the page's own style.
        style = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
        policy = f"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
        return Content(render_page(self._content).encode(), "text/html; charset=utf-8", headers=headers)

    @cached_property
    def _content(self) -> Document:
        return make_document(self._routes)


def render_page(document: Document) -> str:
    """One page of HTML, without scripts or other files."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    operations = [(path, method, described) for path, methods in document["paths"].items() for method, described in methods.items()]
    components: Mapping[str, Document] = document["components"]["schemas"]
    sections = "".join([_operation(path, method, described, components) for path, method, described in operations])
    types = "".join([_type(name, schema) for name, schema in sorted(components.items())])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1>{_paragraphs(document['info']['description'])}"
        f'<p>For programs: <a href="/openapi.json">openapi.json</a>.</p>'
        f"{_contents(operations)}{sections}<h2>Types</h2>{types}</body></html>\n"
    )


def _contents(operations: Iterable[tuple[str, str, Document]]) -> str:
    items = "".join([f'<li><a href="#{escape(one["operationId"])}">{_heading(path, method)}</a></li>' for path, method, one in operations])
    return f"<ul>{items}</ul>"


def _operation(path: str, method: str, described: Document, components: Mapping[str, Document]) -> str:
    parts = [
        f'<h2 id="{escape(described["operationId"])}">{_heading(path, method)}</h2>',
        _paragraphs(described["summary"] + "."),
        _paragraphs(described.get("description", "")),
        "" if described.get("security") == [] else '<p class="note">Needs an API key, if the server has keys.</p>',
        f"<pre>{escape(_curl(path, method, described))}</pre>",
        _parameters(described.get("parameters", [])),
        _body(described, components),
        _answers(described["responses"]),
    ]
    return f"<section>{''.join(parts)}</section>"


def _heading(path: str, method: str) -> str:
    return f'<code><span class="method">{escape(method.upper())}</span> {escape(path)}</code>'


def _paragraphs(text: str) -> str:
    return "".join([f"<p>{_marked(paragraph)}</p>" for paragraph in text.split("\n\n") if paragraph.strip()])


def _marked(text: str) -> str:
    """Escapes the text and marks what is in backticks as code."""
    pieces = text.split("`")
    # A last backtick without a partner is plain text.
    closed = len(pieces) if len(pieces) % 2 else len(pieces) - 1
    marked = [f"<code>{escape(piece)}</code>" if index % 2 else escape(piece) for index, piece in enumerate(pieces[:closed])]
    return "".join(marked) + "".join(f"`{escape(piece)}" for piece in pieces[closed:])


def _curl(path: str, method: str, described: Document) -> str:
    words = [f"curl http://localhost:8000{re.sub('{(.*?)}', lambda found: found[1].upper(), path)}"]
    if method == "delete":
        words.append("-X DELETE")
    if described.get("security") != []:
        words.append('-H "Authorization: Bearer $API_KEY"')
    content = described.get("requestBody", {}).get("content", {}).get("application/json", {})
    if "example" in content:
        body = json.dumps(content["example"], ensure_ascii=False).replace("'", "'\\''")
        words += ["-H 'Content-Type: application/json'", f"-d '{body}'"]
    return " \\\n  ".join(words)


def _parameters(parameters: Iterable[Document]) -> str:
    rows = [
        (
            f"<code>{escape(one['name'])}</code>",
            escape(one["in"]),
            _type_text(one["schema"]),
            _limits(one["schema"]),
            _marked(one["description"]),
        )
        for one in parameters
    ]
    return _table(("Parameter", "In", "Type", "Limits", ""), rows)


def _body(described: Document, components: Mapping[str, Document]) -> str:
    if "requestBody" not in described:
        return ""
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    referred = components.get(schema.get("$ref", "").removeprefix(_REFERENCE))
    if referred is None or "properties" not in referred:
        return f"<p>Body: {_type_text(schema)}</p>"
    return f"<details open><summary>Body: {_type_text(schema)}</summary>{_fields(referred)}</details>"


def _answers(responses: Mapping[str, Document]) -> str:
    rows = []
    for status, response in responses.items():
        kinds = []
        for media_type, content in response["content"].items():
            schema = content.get("x-event") or content["schema"]
            kind = f": {_type_text(schema)}" if "$ref" in schema or "anyOf" in schema else ""
            kinds.append(f"<code>{escape(media_type)}</code>{kind}")
        rows.append((escape(status), "<br>".join(kinds), _marked(response["description"])))
    return _table(("Status", "Answer", ""), rows)


def _type(name: str, schema: Document) -> str:
    fields = _fields(schema) if "properties" in schema else f"<p>{_type_text(schema)}</p>"
    return f'<h3 id="type-{escape(name)}"><code>{escape(name)}</code></h3>{_paragraphs(schema.get("description", ""))}{fields}'


def _fields(schema: Document) -> str:
    required = schema.get("required", [])
    rows = [
        (
            f"<code>{escape(name)}</code>",
            _type_text(field),
            _limits(field),
            "required" if name in required else _default(field),
        )
        for name, field in schema["properties"].items()
    ]
    return _table(("Field", "Type", "Limits", ""), rows)


def _default(field: Document) -> str:
    return "" if field.get("default") is None else f"default <code>{escape(json.dumps(field['default']))}</code>"


def _type_text(schema: Document) -> str:
    """The type of a value, in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REFERENCE)
        return f'<a href="#type-{escape(name)}">{escape(name)}</a>'
    if "anyOf" in schema:
        return " or ".join([_type_text(one) for one in schema["anyOf"]])
    if "enum" in schema:
        return " | ".join([f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"]])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if schema.get("type") == "array":
        return f"array of ({_type_text(schema['items'])})" if schema.get("items") else "array"
    return escape(str(schema.get("type", "anything")))


def _limits(schema: Document) -> str:
    return ", ".join(_limits_of(schema))


def _limits_of(schema: Any) -> list[str]:
    found = [escape(text.format(schema[name])) for name, text in _LIMITS.items() if name in schema]
    for one in schema.get("anyOf", ()):
        found += _limits_of(one)
    items = schema.get("items")
    if isinstance(items, dict):
        found += [f"each {limit}" for limit in _limits_of(items)]
    return found


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """An HTML table. The cells are already HTML."""
    body = "".join([f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows])
    head = "".join([f"<th>{escape(title)}</th>" for title in titles])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""
