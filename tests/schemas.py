"""JSON schemas for trying structured output. Each is finite and short: what it allows is at most some 150 tokens long."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
BOOLEAN: Schema = {"type": "boolean"}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
WORD: Schema = {"type": "string", "pattern": "^[a-z]{1,8}$"}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 12}
COLOUR: Schema = {"enum": ["red", "green", "blue"]}
# No 29th of February, and years that every library knows.
DAY = "(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None, **keywords: Any) -> Schema:
    """An object with these properties and no others."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False, **keywords}


def array(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def text(pattern: str, **keywords: Any) -> Schema:
    return {"type": "string", "pattern": f"^{pattern}$", **keywords}


SCALARS: dict[str, Schema] = {
    "boolean": BOOLEAN,
    "null": NULL,
    "top-level string": NAME,
    "top-level enum": COLOUR,
    "top-level number": {"type": "number", "minimum": 0, "maximum": 8, "multipleOf": 0.5},
    "const string": {"const": "fixed"},
    "const number": {"const": 42},
    "const object": {"const": {"kind": "point", "at": [1, 2.5, None, True]}},
    "enum of mixed types": {"enum": ["one", 2, 3.5, True, None]},
    "enum of objects": {"enum": [{"a": 1}, {"b": [2]}, []]},
    "nullable string": {"type": ["string", "null"], "maxLength": 10},
    "string, integer or boolean": {"type": ["string", "integer", "boolean"], "maxLength": 6, "minimum": 0, "maximum": 99},
}

STRINGS: dict[str, Schema] = {
    "empty string only": {"type": "string", "maxLength": 0},
    "exact length": {"type": "string", "minLength": 5, "maxLength": 5},
    "minimum length": {"type": "string", "minLength": 3, "maxLength": 16},
    "pattern of a plate": text("[A-Z]{2}-[0-9]{3}"),
    "pattern with alternatives": text("(cat|dog|bird)( and (cat|dog))?"),
    "pattern with escapes": text(r"\$[0-9]{1,3}\.[0-9]{2}"),
    "pattern without anchors": {"type": "string", "pattern": "ab", "maxLength": 8},
    "pattern and length": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 6},
    "pattern of quotes": text('["\\\\/]{1,4}'),
    "pattern beyond ASCII": text("[äöüß]{1,5}"),
    "hex colour": text("#[0-9a-f]{6}"),
    "date": text(DAY, format="date"),
    "date and time": text(DAY + "T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z", format="date-time"),
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": text("[a-z]{1,8}@[a-z]{1,8}[.](com|org)", format="email"),
}

NUMBERS: dict[str, Schema] = {
    "integer range": {"type": "integer", "minimum": 1, "maximum": 100},
    "negative integers": {"type": "integer", "minimum": -50, "maximum": -5},
    "range over zero": {"type": "integer", "minimum": -3, "maximum": 3},
    "exclusive integers": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 20},
    "one integer left": {"type": "integer", "exclusiveMinimum": 6, "exclusiveMaximum": 8},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    # Without `multipleOf` a number may have any number of digits. The steps are such that floating point can divide by them.
    "number range": {"type": "number", "minimum": -1.5, "maximum": 2.25, "multipleOf": 0.25},
    "exclusive numbers": {"type": "number", "exclusiveMinimum": -2, "exclusiveMaximum": 2, "multipleOf": 0.5},
    "large integers": {"type": "integer", "minimum": 1_000_000, "maximum": 9_999_999},
    "quarters": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
}

ARRAYS: dict[str, Schema] = {
    "empty array": {"type": "array", "maxItems": 0},
    "top-level array": array(DIGIT, 1, 5),
    "array of strings": array(WORD, 2, 4),
    "array of enums": array(COLOUR, 3, 3),
    "array of arrays": array(array(DIGIT, 1, 3), 1, 3),
    "array of objects": array(record({"x": DIGIT, "y": DIGIT}), 1, 3),
    "array of unions": array({"anyOf": [BOOLEAN, NULL, DIGIT]}, 1, 5),
    "pair": {"type": "array", "prefixItems": [WORD, DIGIT], "items": False, "minItems": 2},
    "tuple and more": {"type": "array", "prefixItems": [WORD], "items": BOOLEAN, "minItems": 1, "maxItems": 4},
    "optional tuple items": {"type": "array", "prefixItems": [DIGIT, COLOUR, BOOLEAN], "items": False, "minItems": 1},
}

OBJECTS: dict[str, Schema] = {
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "one property": record({"name": NAME}),
    "person": record({"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "member": BOOLEAN}),
    "optional properties": record({"id": DIGIT}, {"note": NAME, "flag": BOOLEAN}),
    "all optional": record({}, {"a": DIGIT, "b": DIGIT, "c": DIGIT}),
    "nested objects": record({"a": record({"b": record({"c": record({"d": DIGIT})})})}),
    "object of arrays": record({"tags": array(WORD, 1, 3), "scores": array(DIGIT, 0, 3)}),
    "nullable property": record({"middle": {"anyOf": [WORD, NULL]}}),
    "unicode keys": record({"größe": DIGIT, "名前": WORD, "🙂": BOOLEAN}),
    "names with quotes": record({'say "hi"': DIGIT, "back\\slash": DIGIT, "new\nline": DIGIT}),
    "names with spaces and dots": record({"first name": WORD, "a.b": DIGIT, "$x/y~z": BOOLEAN}),
    "const discriminator": record({"kind": {"const": "circle"}, "radius": DIGIT}),
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": BOOLEAN},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "annotations only say": record({"n": {**DIGIT, "title": "N", "description": "a digit", "default": 3, "examples": [1, 2]}}),
}

COMBINED: dict[str, Schema] = {
    "any of scalars": {"anyOf": [BOOLEAN, DIGIT, WORD]},
    "any of objects": {"anyOf": [record({"cat": WORD}), record({"dog": DIGIT})]},
    "one of types": {"oneOf": [WORD, BOOLEAN, NULL]},
    "one of shapes": {
        "oneOf": [
            record({"kind": {"const": "circle"}, "radius": DIGIT}),
            record({"kind": {"const": "box"}, "width": DIGIT, "height": DIGIT}),
        ]
    },
    "all of ranges": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
            {"type": "object", "properties": {"a": True, "b": BOOLEAN}, "required": ["b"], "additionalProperties": False},
        ]
    },
    "reference": {**record({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}), "$defs": {"point": array(DIGIT, 2, 2)}},
    "definitions": {**record({"who": {"$ref": "#/definitions/name"}}), "definitions": {"name": NAME}},
    "reference to a reference": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": array(COLOUR, 1, 2)}},
    "reference to a property": record({"first": COLOUR, "second": {"$ref": "#/properties/first"}}),
    "tree of three levels": {
        "$ref": "#/$defs/root",
        "$defs": {
            "root": record({"value": DIGIT, "children": array({"$ref": "#/$defs/branch"}, 0, 2)}),
            "branch": record({"value": DIGIT, "children": array({"$ref": "#/$defs/leaf"}, 0, 2)}),
            "leaf": record({"value": DIGIT}),
        },
    },
    "list of at most three": {
        "$ref": "#/$defs/three",
        "$defs": {
            "three": record({"head": DIGIT}, {"tail": {"anyOf": [NULL, {"$ref": "#/$defs/two"}]}}),
            "two": record({"head": DIGIT}, {"tail": {"anyOf": [NULL, {"$ref": "#/$defs/one"}]}}),
            "one": record({"head": DIGIT}),
        },
    },
    "order": record(
        {
            "id": {"type": "integer", "minimum": 1000, "maximum": 9999},
            "status": {"enum": ["open", "paid", "sent"]},
            "items": array(record({"sku": text("[A-Z]{3}[0-9]{2}"), "count": {"type": "integer", "minimum": 1, "maximum": 20}}), 1, 3),
            "gift": BOOLEAN,
        }
    ),
    "weather": record(
        {
            "city": NAME,
            "unit": {"enum": ["C", "F"]},
            "degrees": {"type": "number", "minimum": -60, "maximum": 60, "multipleOf": 0.5},
            "day": text(DAY, format="date"),
        },
        {"wind": record({"speed": DIGIT, "from": {"enum": ["N", "E", "S", "W"]}})},
    ),
    "call of a function": record(
        {
            "name": {"enum": ["search", "open"]},
            "arguments": {"anyOf": [record({"query": NAME}), record({"url": text("https://[a-z]{1,10}[.]org")})]},
        }
    ),
}

CASES: dict[str, Schema] = {**SCALARS, **STRINGS, **NUMBERS, **ARRAYS, **OBJECTS, **COMBINED}
