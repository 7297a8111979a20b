"""What is checked of a JSON schema before it is compiled, and where in it the compiler's complaint belongs. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.wire.errors import GrammarError

Schema = dict[str, Any]
ProblemOf = Callable[[Schema], str]
"""What a compiler says against a schema; empty when it has nothing to say."""

# The compiler recurses, references included, and a stack that overflows ends the process. With the usual eight megabytes that happens
# somewhere beyond 1,600 levels; the JSON parser's own limit is 128.
MAX_DEPTH = 64
MAX_LEVELS = 800

_DEFINITIONS = ("$defs", "definitions")
_HOLDING_MANY = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas", "anyOf", "oneOf", "allOf", "prefixItems")
_HOLDING_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_BOUNDS = (
    ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum")),
    ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum")),
)
_ESCAPED_BYTE = re.compile(rb"%([0-9a-fA-F]{2})")


@dataclass(frozen=True)
class _Part:
    """A keyword of a schema, or one of the schemas that the keyword holds."""

    keyword: str
    key: str | int | None = None

    def under(self, path: str) -> str:
        name = _joined(path, self.keyword)
        return name if self.key is None else _joined(name, self.key)

    def of(self, schema: Schema) -> Any:
        value = schema[self.keyword]
        return value if self.key is None else value[self.key]


def check_schema(schema: Schema) -> None:
    """Raises GrammarError for what the compiler would not survive or gets wrong, and for references that lead nowhere."""
    if _depth(schema) > MAX_DEPTH:
        raise GrammarError(f"the schema is nested more than {MAX_DEPTH} levels deep")
    # A chain of references is never longer than all that is referred to, one below the other.
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
            raise GrammarError(f"the schema and what it refers to have more than {MAX_LEVELS} levels")
        for inner_path, inner in _within(target, ".".join(_steps(str(reference)))):
            _check_bounds(inner_path, inner)
            if "$ref" in inner:
                found.append((_joined(inner_path, "$ref"), inner["$ref"]))


def locate(schema: Schema, problem_of: ProblemOf) -> str:
    """The path of what is to blame for the problem that this schema has, such as `properties.age.type`.

    Parts are left out one after the other; the one without which the problem is another, or none, is to blame. The search is
    binary: a handful of compilations a level.
    """
    schema = copy.deepcopy(schema)
    problem = problem_of(schema)

    def is_same(node: Schema, changed: Schema) -> bool:
        """Whether the problem stays when the content of a node is changed."""
        kept = dict(node)
        _replace(node, changed)
        try:
            return problem_of(schema) == problem
        finally:
            _replace(node, kept)

    node, path = schema, ""
    while True:
        parts = _parts(node)
        blamed = _first_to_blame(node, parts, is_same)
        if blamed is None:
            return path or "the schema"
        _replace(node, _without(node, parts[:blamed]))
        path = parts[blamed].under(path)
        inner = parts[blamed].of(node)
        holds_schema = parts[blamed].key is not None or parts[blamed].keyword in _HOLDING_ONE
        if not (holds_schema and isinstance(inner, dict)) or is_same(inner, {}):
            return path
        node = inner


def _first_to_blame(node: Schema, parts: list[_Part], is_same: Callable[[Schema, Schema], bool]) -> int | None:
    """A part that changes the problem when it is left out after those before it."""
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
    """What may be left out: first the schemas within, definitions before what uses them; `type` last, for without it most is allowed."""
    held = [_Part(keyword, key) for keyword in _HOLDING_MANY for key in _keys(schema.get(keyword))]
    keywords = [_Part(keyword) for keyword in schema if keyword not in (*_DEFINITIONS, "type")]
    return held + keywords + [_Part("type")] * ("type" in schema)


def _without(schema: Schema, parts: list[_Part]) -> Schema:
    """A held schema becomes one that allows all, lest references break; a keyword goes."""
    trimmed = {keyword: copy.copy(value) for keyword, value in schema.items()}
    for part in parts:
        if part.key is None:
            del trimmed[part.keyword]
        else:
            trimmed[part.keyword][part.key] = {}
    return trimmed


def _within(schema: Any, path: str) -> Iterator[tuple[str, Schema]]:
    """A schema and all within it, each with its path. The depth was checked, so it may recurse."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword in _HOLDING_MANY:
        for key in _keys(schema.get(keyword)):
            part = _Part(keyword, key)
            yield from _within(part.of(schema), part.under(path))
    for keyword in _HOLDING_ONE:
        yield from _within(schema.get(keyword), _joined(path, keyword))


def _check_bounds(path: str, schema: Schema) -> None:
    """The compiler lets a whole number through that is excluded when the other bound is less than one away."""
    for excluded, plain, others in _BOUNDS:
        bound = _number(schema.get(excluded))
        if bound is None or bound % 1:
            continue
        for other in others:
            limit = _number(schema.get(other))
            if limit is not None and 0 < abs(limit - bound) < 1:
                name = _joined(path, excluded)
                raise GrammarError(f"`{name}`: a whole number less than 1 from `{other}` cannot be excluded; use `{plain}`")


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
    """The steps of a JSON pointer in a URI fragment, with both kinds of escapes undone."""
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
    """In place, so that the schema around it changes, too."""
    node.clear()
    node.update(content)


def _depth(value: object) -> int:
    """How deep objects and lists are nested, found without recursing: the value may be deeper than the stack."""
    deepest = 0
    waiting = [(value, 1)]
    while waiting:
        inner, depth = waiting.pop()
        if isinstance(inner, (dict, list)):
            deepest = max(deepest, depth)
            waiting += [(held, depth + 1) for held in (inner.values() if isinstance(inner, dict) else inner)]
    return deepest
