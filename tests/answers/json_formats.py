"""`hermes`, `llama3_json`, `phi4`, `granite`, `json`: objects that name a tool."""

from __future__ import annotations

from answers.transcript import Transcript, broken, call
from penstock.text.output import Reasoning

HERMES = [
    Transcript("plain", "The answer is 4 < 5, is it not?\n", ["The answer is 4 < 5, is it not?\n"]),
    Transcript(
        "one call",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        call(0, "get_weather", '{"city": "Paris"}'),
    ),
    Transcript(
        "text around two calls",
        'Let me see.\n\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "search", "arguments": {"query": "x"}}\n</tool_call>\nDone. \n',
        ["Let me see.", *call(0, "ping"), *call(1, "search", '{"query": "x"}'), "\nDone. \n"],
    ),
    Transcript(
        "braces and quotes in strings",
        '<tool_call>{"name": "search", "arguments": '
        '{"query": "a \\"}}</tool_call>{ \\\\", "filters": {"a": [1, {"b": "]"}], "c": null}}}</tool_call>',
        call(0, "search", '{"query": "a \\"}}</tool_call>{ \\\\", "filters": {"a": [1, {"b": "]"}], "c": null}}'),
    ),
    Transcript(
        "unicode",
        'Größe 名前 🙂 <tool_call>{"name": "search", "arguments": {"query": "🙂 名 \\ud83d\\ude42 \\u00e9 é"}}</tool_call>',
        ["Größe 名前 🙂", *call(0, "search", '{"query": "🙂 名 \\ud83d\\ude42 \\u00e9 é"}')],
    ),
    Transcript(
        "half a surrogate",
        '<tool_call>{"name": "search", "arguments": {"query": "\\ud83d"}}</tool_call>',
        call(0, "search", '{"query": "\\ud83d"}'),
    ),
    Transcript("arguments first", '<tool_call>{"arguments": {"a": [1, 2]}, "name": "ping"}</tool_call>', call(0, "ping", '{"a": [1, 2]}')),
    Transcript(
        "arguments in a string",
        '<tool_call>{"name": "ping", "arguments": "{\\"a\\": \\"b\\\\nc\\"}"}</tool_call>',
        call(0, "ping", '{"a": "b\\nc"}'),
    ),
    Transcript(
        "a string that holds none",
        '<tool_call>{"name": "ping", "arguments": "hello"}</tool_call>',
        [
            *broken(0, "ping", "", '<tool_call>{"name": "ping", "arguments": "hello"'),
            "}</tool_call>",
        ],
    ),
    Transcript("no arguments", '<tool_call>{"name": "ping"}</tool_call>', call(0, "ping")),
    Transcript("null for arguments", '<tool_call>{"name": "ping", "arguments": null}</tool_call>', call(0, "ping")),
    Transcript(
        "arguments that are no object",
        '<tool_call>{"name": "ping", "arguments": [1]}</tool_call>',
        [
            *broken(0, "ping", "", '<tool_call>{"name": "ping", "arguments": [1]'),
            "}</tool_call>",
        ],
    ),
    Transcript(
        "unknown tool and unknown keys",
        '<tool_call>{"id": "a", "x": {"y": [1]}, "name": "launch", "arguments": {"now": true}}</tool_call>',
        call(0, "launch", '{"now": true}'),
    ),
    Transcript("cut within the marker", "Hm. <tool_ca", ["Hm. <tool_ca"]),
    Transcript("cut before the name", 'Hm.\n<tool_call>\n{"name": "get_', ['Hm.\n<tool_call>\n{"name": "get_']),
    Transcript(
        "cut within the arguments",
        'Hm.\n<tool_call>\n{"name": "search", "arguments": {"query": "abc',
        ["Hm.", *broken(0, "search", '{"query": "abc', '\n<tool_call>\n{"name": "search", "arguments": {"query": "abc')],
    ),
    Transcript(
        "cut within a number and an escape",
        '<tool_call>{"name": "ping", "arguments": {"a": 12</tool_call><tool_call>{"name": "ping", "arguments": {"a": "\\u12',
        [
            *broken(0, "ping", '{"a": 12', '<tool_call>{"name": "ping", "arguments": {"a": 12'),
            "</tool_call>",
            *broken(1, "ping", '{"a": "', '<tool_call>{"name": "ping", "arguments": {"a": "\\u12'),
        ],
    ),
    Transcript("cut before the end marker", '<tool_call>{"name": "ping", "arguments": {}}', call(0, "ping")),
    Transcript("cut within the end marker", '<tool_call>{"name": "ping", "arguments": {}}\n</tool', call(0, "ping")),
    Transcript("not JSON", "<tool_call>ping()</tool_call> Sorry.", ["<tool_call>ping()</tool_call> Sorry."]),
    Transcript(
        "broken, then right",
        '<tool_call>{"name": "ping", "arguments": {oops}}</tool_call>\n<tool_call>{"name": "ping"}</tool_call>',
        [*broken(0, "ping", "{", '<tool_call>{"name": "ping", "arguments": {'), "oops}}</tool_call>", *call(1, "ping")],
    ),
    Transcript(
        "two objects in one tag",
        '<tool_call>{"name": "ping"}\n{"name": "ping", "arguments": {"a": 1}}</tool_call>',
        [
            *call(0, "ping"),
            *call(1, "ping", '{"a": 1}'),
        ],
    ),
    Transcript("text instead of the end marker", '<tool_call>{"name": "ping"}  and so on', [*call(0, "ping"), "  and so on"]),
    Transcript(
        "newlines within strings",
        '<tool_call>{"name": "search", "arguments": {"query": "a\nb\tc"}}</tool_call>',
        call(0, "search", '{"query": "a\\nb\\tc"}'),
    ),
    Transcript(
        "without tools",
        '<tool_call>{"name": "ping"}</tool_call>',
        ['<tool_call>{"name": "ping"}</tool_call>'],
        reasoning="think",
        schemas={},
    ),
    Transcript(
        "reasoning before a call",
        '<think>\nI need <tool_call>.\n</think>\n\n<tool_call>{"name": "ping"}</tool_call>',
        [Reasoning("I need <tool_call>."), *call(0, "ping")],
        reasoning="think",
    ),
    Transcript("no name", '<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
    Transcript("empty name", '<tool_call>{"name": ""}</tool_call>', ['<tool_call>{"name": ""}</tool_call>']),
]

LLAMA3_JSON = [
    Transcript("plain", "Sure: {1; 2}", ["Sure: {1; 2}"]),
    Transcript("one call", '{"name": "get_weather", "parameters": {"city": "Paris"}}', call(0, "get_weather", '{"city": "Paris"}')),
    Transcript("after the tag", '<|python_tag|>{"name": "ping", "parameters": {}}', call(0, "ping")),
    Transcript(
        "two calls",
        '{"name": "ping", "parameters": {}}; {"name": "search", "parameters": {"query": "a; b"}}\n',
        [*call(0, "ping"), *call(1, "search", '{"query": "a; b"}')],
    ),
    Transcript(
        "type and arguments", '{"type": "function", "name": "ping", "arguments": {"a": {"b": "}"}}}', call(0, "ping", '{"a": {"b": "}"}}')
    ),
    Transcript("other JSON", '{"answer": {"name": "ping"}}', ['{"answer": {"name": "ping"}}']),
    Transcript("unknown tool is JSON", '  {"name": "Ada", "parameters": {}}', ['  {"name": "Ada", "parameters": {}}']),
    Transcript("unknown tool after the tag", '<|python_tag|>{"name": "Ada", "parameters": {}}', call(0, "Ada")),
    Transcript("JSON in the middle", 'Write {"name": "ping", "parameters": {}}.', ['Write {"name": "ping", "parameters": {}}.']),
    Transcript("parameters first", '\n{"parameters": {"q": "🙂"}, "name": "ping"}', call(0, "ping", '{"q": "🙂"}')),
    Transcript("code after the tag", '<|python_tag|>print("hi")', ['<|python_tag|>print("hi")']),
    Transcript("cut in the name", '{"name": "pi', ['{"name": "pi']),
    Transcript(
        "cut in the parameters",
        '{"name": "ping", "parameters": {"a": [tr',
        broken(0, "ping", '{"a": [', '{"name": "ping", "parameters": {"a": [tr'),
    ),
    Transcript("cut after a separator", '{"name": "ping", "parameters": {}}; ', call(0, "ping")),
    Transcript("text after a separator", '{"name": "ping"}; that is it', [*call(0, "ping"), "; that is it"]),
    Transcript("text before the tag", 'Let me call. <|python_tag|>{"name": "ping"}', ["Let me call.", *call(0, "ping")]),
    Transcript(
        "malformed", '{"name": "ping", "parameters": {"a" 1}}', [*broken(0, "ping", '{"a" ', '{"name": "ping", "parameters": {"a" '), "1}}"]
    ),
    Transcript(
        "reasoning before a call",
        '<think>hm</think>\n{"name": "ping", "parameters": {}}',
        [Reasoning("hm"), *call(0, "ping")],
        reasoning="think",
    ),
    Transcript("whitespace only", " \n ", [" \n "]),
]

PHI4 = [
    Transcript("plain", "import functools\nfunctools.reduce", ["import functools\nfunctools.reduce"]),
    Transcript("one call", '<|tool_call|>[{"name": "ping", "arguments": {"a": 1}}]<|/tool_call|>', call(0, "ping", '{"a": 1}')),
    Transcript(
        "two calls",
        '<|tool_call|>[{"name": "ping", "arguments": {}}, {"name": "search", "arguments": {"query": "[,]"}}]<|/tool_call|>',
        [*call(0, "ping"), *call(1, "search", '{"query": "[,]"}')],
    ),
    Transcript("functools", 'functools[{"name": "get_weather", "arguments": {"city": "Ulm"}}]', call(0, "get_weather", '{"city": "Ulm"}')),
    Transcript("functools, after text", 'Well,\nfunctools[{"name": "ping", "parameters": {}}]', ["Well,", *call(0, "ping")]),
    Transcript("an object alone", '<|tool_call|>{"name": "ping", "arguments": {}}<|/tool_call|>', call(0, "ping")),
    Transcript("text after", '<|tool_call|>[{"name": "ping"}]<|/tool_call|> Done.', [*call(0, "ping"), " Done."]),
    Transcript("without the end", '<|tool_call|>[{"name": "ping"}]', call(0, "ping")),
    Transcript("cut between calls", '<|tool_call|>[{"name": "ping"}, ', call(0, "ping")),
    Transcript(
        "cut in the second",
        '<|tool_call|>[{"name": "ping"}, {"name": "search", "arguments": {"query"',
        [*call(0, "ping"), *broken(1, "search", '{"query"', ', {"name": "search", "arguments": {"query"')],
    ),
    Transcript("empty list", "<|tool_call|>[]<|/tool_call|>", ["<|tool_call|>[]<|/tool_call|>"]),
    Transcript("garbage in the list", 'functools[{"name": "ping"}, oops]', [*call(0, "ping"), ", oops]"]),
    Transcript(
        "unknown tool", '<|tool_call|>[{"name": "launch", "arguments": {"é": "🙂"}}]<|/tool_call|>', call(0, "launch", '{"é": "🙂"}')
    ),
    Transcript("an index", "functools[0] is none", ["functools[0] is none"]),
    Transcript("cut within the marker", "so <|tool_c", ["so <|tool_c"]),
]

GRANITE = [
    Transcript("plain", "A <b>bold</b> word.", ["A <b>bold</b> word."]),
    Transcript(
        "one call", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]', call(0, "get_weather", '{"city": "Rome"}')
    ),
    Transcript(
        "two calls",
        '<|tool_call|>[{"name": "ping", "arguments": {}}, {"arguments": {"query": "{"}, "name": "search"}]\n',
        [*call(0, "ping"), *call(1, "search", '{"query": "{"}')],
    ),
    Transcript("the other marker", '<tool_call>[{"name": "ping", "arguments": {}}]', call(0, "ping")),
    Transcript(
        "tags around objects",
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "ping"}</tool_call>',
        [*call(0, "ping"), *call(1, "ping")],
    ),
    Transcript("text before", 'I will look. <|tool_call|> [{"name": "ping"}]', ["I will look.", *call(0, "ping")]),
    Transcript("text after", '<|tool_call|>[{"name": "ping"}]\nThat is all.', [*call(0, "ping"), "\nThat is all."]),
    Transcript(
        "cut in the list",
        '<|tool_call|>[{"name": "search", "arguments": {"query": "名',
        broken(0, "search", '{"query": "名', '<|tool_call|>[{"name": "search", "arguments": {"query": "名'),
    ),
    Transcript("cut after an object", '<|tool_call|>[{"name": "ping"}', call(0, "ping")),
    Transcript("cut at the bracket", "<|tool_call|>[", ["<|tool_call|>["]),
    Transcript("not JSON", "<|tool_call|>none", ["<|tool_call|>none"]),
    Transcript("unknown tool", '<|tool_call|>[{"name": "launch", "arguments": {}}]', call(0, "launch")),
    Transcript(
        "reasoning before a call",
        'Here is my thought process: I must call.\nHere is my response: <|tool_call|>[{"name": "ping"}]',
        [Reasoning("I must call."), *call(0, "ping")],
        reasoning="granite",
    ),
    Transcript(
        "broken",
        '<|tool_call|>[{"name": "ping", "arguments": {"a": 01}}]',
        [*broken(0, "ping", '{"a": ', '<|tool_call|>[{"name": "ping", "arguments": {"a": '), "01}}]"],
    ),
]

JSON = [
    Transcript("plain", "[1] says so.", ["[1] says so."]),
    Transcript("one call", '[{"name": "ping", "parameters": {"a": 1}}]', call(0, "ping", '{"a": 1}')),
    Transcript(
        "two calls",
        '[{"name": "ping", "parameters": {}}, {"name": "search", "parameters": {"query": "]"}}]',
        [*call(0, "ping"), *call(1, "search", '{"query": "]"}')],
    ),
    Transcript("arguments", '[{"name": "ping", "arguments": {"a": "🙂"}}]', call(0, "ping", '{"a": "🙂"}')),
    Transcript("unknown tool is JSON", '[{"name": "Ada", "parameters": {}}]', ['[{"name": "Ada", "parameters": {}}]']),
    Transcript("other JSON", '[{"x": 1}]', ['[{"x": 1}]']),
    Transcript("not at the beginning", 'See [{"name": "ping"}]', ['See [{"name": "ping"}]']),
    Transcript("whitespace around", ' \n[{"name": "ping", "parameters": {}}]\n', call(0, "ping")),
    Transcript("cut in a name", '[{"name": "ping', ['[{"name": "ping']),
    Transcript(
        "cut in parameters",
        '[{"name": "ping", "parameters": {"a": nu',
        broken(0, "ping", '{"a": ', '[{"name": "ping", "parameters": {"a": nu'),
    ),
    Transcript("text after", '[{"name": "ping"}] ok', [*call(0, "ping"), " ok"]),
    Transcript("no comma", '[{"name": "ping"} {"name": "ping"}]', [*call(0, "ping"), ' {"name": "ping"}]']),
    Transcript(
        "reasoning before", '<think>hm</think>[{"name": "ping", "parameters": {}}]', [Reasoning("hm"), *call(0, "ping")], reasoning="think"
    ),
]
