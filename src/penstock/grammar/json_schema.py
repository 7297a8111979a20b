"""Checks a JSON schema before it is compiled, and finds the part that a compiler's error is about. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.wire.errors import GrammarError

Schema = dict[str, Any]
ProblemOf = Callable[[Schema], str]
"""A compiler's error about a schema; empty when there is none."""

# The compiler recurses, also through references, and a stack overflow ends the process. With the usual eight megabytes that happens
# beyond 1,600 levels. The JSON parser's own limit is 128.
MAX_DEPTH = 64
MAX_LEVELS = 800

_DEFINITIONS = ("$defs", "definitions")
_WITH_MANY_SCHEMAS = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas", "anyOf", "oneOf", "allOf", "prefixItems")
_WITH_ONE_SCHEMA = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_BOUNDS = (
    ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum")),
    ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum")),
)
_ESCAPED_BYTE = re.compile(rb"%([0-9a-fA-F]{2})")


@dataclass(frozen=True)
class _Part:
    """A keyword of a schema, or one of the schemas under that keyword."""

    keyword: str
    key: str | int | None = None

    def under(self, path: str) -> str:
        name = _joined(path, self.keyword)
        return name if self.key is None else _joined(name, self.key)

    def of(self, schema: Schema) -> Any:
        value = schema[self.keyword]
        return value if self.key is None else value[self.key]


def check_schema(schema: Schema) -> None:
    """Raises GrammarError for schemas that would crash the compiler or that it gets wrong, and for broken references."""
    if _depth(schema) > MAX_DEPTH:
        raise GrammarError(f"the schema is nested more than {MAX_DEPTH} levels deep")
    # No chain of references is longer than the sum of all levels that are referred to.
    levels = 0
    seen: set[int] = set()
    found: list[tuple[str, object]] = [("", "#")]
    while found:
        path, reference = found.pop()
        target = _resolved(schema, path, reference)
        if id(target) in seen:
            continue
        seen.add(id(target))
        levels += _depth(target)
        if levels > MAX_LEVELS:
            raise GrammarError(f"the schema has more than {MAX_LEVELS} levels, references included")
        for inner_path, inner in _within(target, ".".join(_steps(str(reference)))):
            _check_bounds(inner_path, inner)
            if "$ref" in inner:
                found.append((_joined(inner_path, "$ref"), inner["$ref"]))


def locate(schema: Schema, problem_of: ProblemOf) -> str:
    """The path of the part that causes this schema's problem, such as `properties.age.type`.

    Parts are left out one after the other. The part without which the problem changes or goes causes it. The search is binary: a few
    compilations per level.
    """
    schema = copy.deepcopy(schema)
    problem = problem_of(schema)

    def is_same(node: Schema, changed: Schema) -> bool:
        """Whether the problem stays when a node has this content instead."""
        kept = dict(node)
        _replace(node, changed)
        try:
            return problem_of(schema) == problem
        finally:
            _replace(node, kept)

    node, path = schema, ""
    while True:
        parts = _parts(node)
        cause = _first_cause(node, parts, is_same)
        if cause is None:
            return path or "the schema"
        _replace(node, _without(node, parts[:cause]))
        path = parts[cause].under(path)
        inner = parts[cause].of(node)
        holds_schema = parts[cause].key is not None or parts[cause].keyword in _WITH_ONE_SCHEMA
        if not (holds_schema and isinstance(inner, dict)) or is_same(inner, {}):
            return path
        node = inner


def _first_cause(node: Schema, parts: list[_Part], is_same: Callable[[Schema, Schema], bool]) -> int | None:
    """The part that changes the problem when it is left out together with those before it."""
    low, high = 0, len(parts)
    if is_same(node, _without(node, parts)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if is_same(node, _without(node, parts[:middle])):
            low = middle
        else:
            high = middle
    return low


def _parts(schema: Schema) -> list[_Part]:
    """The parts that may be left out: first inner schemas, definitions before their users; `type` last: most is allowed without it."""
    held = [_Part(keyword, key) for keyword in _WITH_MANY_SCHEMAS for key in _keys(schema.get(keyword))]
    keywords = [_Part(keyword) for keyword in schema if keyword not in (*_DEFINITIONS, "type")]
    return held + keywords + [_Part("type")] * ("type" in schema)


def _without(schema: Schema, parts: list[_Part]) -> Schema:
    """Inner schemas become `{}`, which allows everything, so that references do not break. Keywords are removed."""
    trimmed = {keyword: copy.copy(value) for keyword, value in schema.items()}
    for part in parts:
        if part.key is None:
            del trimmed[part.keyword]
        else:
            trimmed[part.keyword][part.key] = {}
    return trimmed


def _within(schema: Any, path: str) -> Iterator[tuple[str, Schema]]:
    """A schema and all inner schemas, each with its path. It may recurse: the depth was checked."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword in _WITH_MANY_SCHEMAS:
        for key in _keys(schema.get(keyword)):
            part = _Part(keyword, key)
            yield from _within(part.of(schema), part.under(path))
    for keyword in _WITH_ONE_SCHEMA:
        yield from _within(schema.get(keyword), _joined(path, keyword))


def _check_bounds(path: str, schema: Schema) -> None:
    """The compiler allows an excluded whole number when the other bound is less than 1 away from it."""
    for excluded, plain, others in _BOUNDS:
        bound = _number(schema.get(excluded))
        if bound is None or bound % 1:
            continue
        for other in others:
            limit = _number(schema.get(other))
            if limit is not None and 0 < abs(limit - bound) < 1:
                name = _joined(path, excluded)
                raise GrammarError(f"`{name}` is less than 1 away from `{other}`, which is not supported: use `{plain}`")


def _number(value: object) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) >= 2**53:
        return None
    return value


def _resolved(schema: Schema, path: str, reference: object) -> Any:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise GrammarError(f"`{path}` is {reference!r}: expected a reference within the schema, such as '#/$defs/name'")
    value: Any = schema
    for step in _steps(reference):
        keys = _keys(value)
        key = int(step) if isinstance(value, list) and step.isdecimal() and len(step) < 10 else step
        if key not in keys:
            raise GrammarError(f"`{path}` is {reference!r}: the schema has no such part")
        value = value[key]
    return value


def _steps(reference: str) -> list[str]:
    """The steps of a JSON pointer in a URI fragment, unescaped."""
    pointer = _ESCAPED_BYTE.sub(lambda found: bytes([int(found[1], 16)]), reference.encode()).decode("utf-8", "replace")
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _keys(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value)
    return list(range(len(value))) if isinstance(value, list) else []


def _joined(path: str, step: str | int) -> str:
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step}" if path else step


def _replace(node: Schema, content: Schema) -> None:
    """In place: the schema around it changes with it."""
    node.clear()
    node.update(content)


def _depth(value: object) -> int:
    """How deep objects and lists are nested. It does not recurse: the value may be deeper than the stack."""
    deepest = 0
    waiting = [(value, 1)]
    while waiting:
        inner, depth = waiting.pop()
        if isinstance(inner, (dict, list)):
            deepest = max(deepest, depth)
            waiting += [(held, depth + 1) for held in (inner.values() if isinstance(inner, dict) else inner)]
    return deepest
