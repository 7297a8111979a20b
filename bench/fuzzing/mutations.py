"""Makes malformed bodies from valid ones."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Path = tuple[str | int, ...]

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 127, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 0.5, -0.0, 1e-320, 1e308),
    *(
        "",
        " ",
        "x",
        "\x00",
        "\n",
        "auto",
        "true",
        "1",
        "null",
        "\u2028",
        "😀",
        "\u0301" * 40,
        "x" * 5_000,
        "<|im_end|>",
        "{{ 1 }}",
        "a" * 300,
    ),
    *([], [None], [[]], [1], ["x"], [{}], [0] * 300, ["x"] * 200, [[1], "x"]),
    *({}, {"": None}, {"type": "text"}, {"type": "function"}, {"type": "object"}, {"$ref": "#"}, {"x": {"x": {}}}, {"0": 1}, {"-1": 1e9}),
    *({"type": "json_schema"}, {"session_control": {}}, {"type": "array", "items": {"$ref": "#/x"}}, {"pattern": "("}, {"minItems": 10**9}),
)
"""Each is JSON that hardly any field allows."""

RAW_VALUES = (
    *(
        b"NaN",
        b"-Infinity",
        b"Infinity",
        b"1e999",
        b"-1e999",
        b"1" * 400,
        b"1." + b"3" * 4_000,
        b"01",
        b"+1",
        b".5",
        b"1.",
        b"0x10",
        b"--1",
    ),
    *(
        rb'"\ud800"',
        rb'"\udc00\ud800"',
        rb'"\u0000"',
        rb'"\u12"',
        rb'"\x41"',
        b'"\xff\xfe"',
        b'"\xed\xa0\x80"',
        b'"\xf4\x90\x80\x80"',
        b'"\n"',
    ),
    *(b"'x'", b"undefined", b"True", b"nul", b"[1,]", b'{"a":1,}', b"[,]", b"{1:2}", b"/**/1", b'"', b"[", b"{", b"]", b"}", b""),
)
"""Replacements for a value. Most are not JSON."""

ODD_HEADERS: tuple[Mapping[str, str], ...] = (
    {"content-type": "text/plain"},
    {"content-type": "application/json; charset=utf-16"},
    {"content-type": "multipart/form-data"},
    {"content-encoding": "gzip"},
    {"content-encoding": "br, gzip, x"},
    {"expect": "100-continue"},
    {"expect": "the unexpected"},
    {"accept": "image/png"},
    {"accept-encoding": "*;q=0"},
    {"authorization": "Bearer"},
    {"authorization": "Bearer " + "x" * 4_000},
    {"authorization": "Basic Zm9vOmJhcg=="},
    {"x-api-key": "\xff\xfe"},
    {"x-session-id": ""},
    {"x-session-id": "x" * 257},
    {"x-session-id": "\xe9\xff"},
    {"x-session-id": "a/b/../c?d#e", "x-parent-session-id": "a/b"},
    {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a" * 255},
    {"x-penstock-router": "random walk"},
    {"x-session-affinity": "\t"},
    {"last-event-id": "-1"},
    {"last-event-id": "9" * 400},
    {"anthropic-version": "yesterday", "anthropic-beta": ",,,"},
    {"origin": "null"},
    {"cookie": "a=b; " * 200},
    {"x-" + "y" * 200: "z" * 8_000},
    {"host": "[::"},
    {"upgrade": "websocket", "connection": "Upgrade"},
    {"connection": "close, x"},
)


class Malformed(NamedTuple):
    """A request's body and headers, and the kind of mutation."""

    kind: str
    body: bytes
    headers: Mapping[str, str]


class Mutations:
    """Malformed bodies for one route, made from valid bodies and the route's field names. The same seed gives the same bodies."""

    def __init__(self, examples: Sequence[Mapping[str, Any]], fields: Sequence[str], seed: int, big: int) -> None:
        self._examples = examples
        self._fields = fields
        self._random = random.Random(seed)
        self._big = big
        self._kinds: dict[str, tuple[int, Callable[[], bytes]]] = {
            "truncated": (10, self._truncated),
            "wrong_type": (25, self._wrong_type),
            "two_wrong": (8, self._two_wrong),
            "raw_value": (15, self._raw_value),
            "odd_field": (25, self._odd_field),
            "missing_field": (5, self._missing_field),
            "unknown_field": (5, self._unknown_field),
            "duplicate_key": (4, self._duplicate_key),
            "deep": (4, self._deep),
            "flipped_bytes": (10, self._flipped_bytes),
            "noise": (4, self._noise),
            "other_json": (2, self._other_json),
            "long_text": (3, self._long_text),
            "many": (2, self._many),
            "right": (4, self._right),
        }
        self._weights = [weight for weight, _ in self._kinds.values()]

    def next(self) -> Malformed:
        (kind,) = self._random.choices(list(self._kinds), self._weights)
        headers = self._random.choice(ODD_HEADERS) if self._random.random() < 0.1 else {}
        return Malformed(kind, self._kinds[kind][1](), headers)

    def heaviest(self) -> list[Malformed]:
        """Bodies that need the most memory: near the size limit, as one string, many values, or nested values."""
        example = encoded(self._example())[:-1] + b","
        name = json.dumps(self._fields[-1]).encode() + b":"
        room = self._big - len(example) - len(name) - 10
        return [
            Malformed("heavy", example + name + b'"' + b"x" * room + b'"}', {}),
            Malformed("heavy", example + name + b"[" + b"1," * (room // 2 - 1) + b"1]}", {}),
            Malformed("heavy", example + name + b"[" + b"{}," * (room // 3 - 1) + b"{}]}", {}),
            Malformed("heavy", example + name + b"[" * 100_000 + b"]" * 100_000 + b"}", {}),
        ]

    def _example(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self._random.choice(self._examples)))

    def _odd(self) -> Any:
        return copy.deepcopy(self._random.choice(ODD_VALUES))

    def _right(self) -> bytes:
        return encoded(self._example())

    def _truncated(self) -> bytes:
        body = encoded(self._example())
        return body[: self._random.randrange(len(body))]

    def _wrong_type(self) -> bytes:
        example = self._example()
        return encoded(replaced(example, self._random.choice(paths(example)), self._odd()))

    def _two_wrong(self) -> bytes:
        example = self._example()
        for _ in range(2):
            example = replaced(example, self._random.choice(paths(example)), self._odd())
            if not isinstance(example, dict):
                break
        return encoded(example)

    def _raw_value(self) -> bytes:
        example = self._example()
        marked = encoded(replaced(example, self._random.choice(paths(example)), "@@"))
        return marked.replace(b'"@@"', self._random.choice(RAW_VALUES))

    def _odd_field(self) -> bytes:
        return encoded({**self._example(), self._random.choice(self._fields): self._odd()})

    def _missing_field(self) -> bytes:
        example = self._example()
        del example[self._random.choice(list(example))]
        return encoded(example)

    def _unknown_field(self) -> bytes:
        example = self._example()
        objects = [path for path in [(), *paths(example)] if isinstance(at(example, path), dict)]
        at(example, self._random.choice(objects))[self._random.choice(("unknown", "", "\x00", "`$.x`", "x" * 400))] = self._odd()
        return encoded(example)

    def _duplicate_key(self) -> bytes:
        example = self._example()
        name = self._random.choice(list(example))
        return encoded(example)[:-1] + b"," + encoded({name: self._odd()})[1:]

    def _deep(self) -> bytes:
        depth = self._random.choice((10, 100, 500, 1_000, 2_000, 10_000, 100_000))
        opening, closing = self._random.choice(
            ((b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]"), (b'{"items":', b"}"), (b'{"$ref":', b"}"))
        )
        nested = opening * depth + b"1" + (closing * depth if self._random.random() < 0.7 else b"")
        if self._random.random() < 0.2:
            return nested
        name = json.dumps(self._random.choice([*self._fields, "unknown"])).encode()
        return encoded(self._example())[:-1] + b"," + name + b":" + nested + b"}"

    def _flipped_bytes(self) -> bytes:
        body = bytearray(encoded(self._example()))
        for _ in range(self._random.choice((1, 1, 1, 2, 5))):
            body[self._random.randrange(len(body))] = self._random.randrange(256)
        return bytes(body)

    def _noise(self) -> bytes:
        return self._random.choice(
            (b"", b" ", b"\xef\xbb\xbf{}", b"\x00", b"\x1f\x8b\x08\x00", self._random.randbytes(self._random.randrange(1, 500)))
        )

    def _other_json(self) -> bytes:
        return encoded(self._odd())

    def _long_text(self) -> bytes:
        """Near the limits of names and the context, and sometimes of the body."""
        length = self._random.choice(
            (64, 65, 256, 257, 4_000, 20_000, 70_000, 300_000) if self._random.random() < 0.98 else (self._big - 300, self._big + 1)
        )
        text = self._random.choice(("x", " word", "é", "\x00", "\\", '"', "\u2028", "<")) * length
        example = self._example()
        strings = [path for path in paths(example) if isinstance(at(example, path), str)]
        return encoded(replaced(example, self._random.choice(strings), text[:length]))

    def _many(self) -> bytes:
        """Lists with very many elements."""
        example = self._example()
        lists = [path for path in paths(example) if isinstance(at(example, path), list) and at(example, path)]
        if not lists:
            return encoded(example)
        path = self._random.choice(lists)
        return encoded(replaced(example, path, at(example, path) * self._random.choice((2, 20, 200, 2_000))))


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def paths(value: Any, prefix: Path = ()) -> list[Path]:
    """The paths of all values inside a value."""
    members: Sequence[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        members = list(value.items())
    elif isinstance(value, list):
        members = list(enumerate(value))
    found: list[Path] = []
    for key, member in members:
        found += [(*prefix, key), *paths(member, (*prefix, key))]
    return found


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value at the path."""
    if not path:
        return new
    at(value, path[:-1])[path[-1]] = new
    return value
