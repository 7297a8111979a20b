"""`pythonic` and `gemma`: calls as in a program."""

from __future__ import annotations

from answers.transcript import Transcript, broken, call
from penstock.text.output import Reasoning

PYTHONIC = [
    Transcript("plain", "A list: [1, 2]", ["A list: [1, 2]"]),
    Transcript("one call", '[get_weather(city="Paris", days=3)]', call(0, "get_weather", '{"city": "Paris", "days": 3}')),
    Transcript(
        "two calls", "[ping(), search(query='x', exact=True)]\n", [*call(0, "ping"), *call(1, "search", '{"query": "x", "exact": true}')]
    ),
    Transcript(
        "nested values",
        "[search(filters={'a': [1, -2.5, None], \"b\": {'c': (1, 'd')}, 'e': {}}, tags=[], exact=False,)]",
        call(0, "search", '{"filters": {"a": [1, -2.5, null], "b": {"c": [1, "d"]}, "e": {}}, "tags": [], "exact": false}'),
    ),
    Transcript(
        "quotes and brackets in strings",
        "[search(query='it\\'s \"]\" ), (', tags=[\"a'b\", ''])]",
        call(0, "search", '{"query": "it\'s \\"]\\" ), (", "tags": ["a\'b", ""]}'),
    ),
    Transcript(
        "escapes",
        "[search(query='\\n\\t\\x41\\u00e9\\U0001f642\\ud83d\\ude42\\101\\d\\\\')]",
        call(0, "search", '{"query": "\\n\\tAé🙂\\ud83d\\ude42A\\\\d\\\\"}'),
    ),
    Transcript("three quotes", '[search(query="""a "b"\nc""")]', call(0, "search", '{"query": "a \\"b\\"\\nc"}')),
    Transcript("unicode", "[search(query='名前 🙂')]", call(0, "search", '{"query": "名前 🙂"}')),
    Transcript("unknown tool is text", "[launch(now=True)]", ["[launch(now=True)]"]),
    Transcript("unknown tool within markers", "<|python_start|>[launch(now=True)]<|python_end|>", call(0, "launch", '{"now": true}')),
    Transcript("a footnote", "[1](http://x) says so", ["[1](http://x) says so"]),
    Transcript("a link", "[ping](http://x) says so", ["[ping](http://x) says so"]),
    Transcript("not at the beginning", "I call [ping()]", ["I call [ping()]"]),
    Transcript("positional", "[ping(1)]", [*broken(0, "ping", "", "[ping(1"), ")]"]),
    Transcript("cut in the name", "[get_wea", ["[get_wea"]),
    Transcript("cut in a string", "[search(query='ab", broken(0, "search", '{"query": "ab', "[search(query='ab")),
    Transcript("cut in a word", "[search(exact=Tr", broken(0, "search", '{"exact": ', "[search(exact=Tr")),
    Transcript("cut between calls", "[ping(), ", call(0, "ping")),
    Transcript("text after", "[ping()] and then", [*call(0, "ping"), " and then"]),
    Transcript("a word that is none", "[search(exact=yes)]", [*broken(0, "search", '{"exact": ', "[search(exact=yes"), ")]"]),
    Transcript("reasoning before", "<think>hm</think>\n\n[ping()]", [Reasoning("hm"), *call(0, "ping")], reasoning="think"),
]

GEMMA = [
    Transcript("plain", "Use `x` or\n```python\nx()\n```\n", ["Use `x` or\n```python\nx()\n```\n"]),
    Transcript("a block", "```tool_code\nget_weather(city='Paris')\n```", call(0, "get_weather", '{"city": "Paris"}')),
    Transcript("text around", "I look.\n```tool_code\nping()\n```\nDone.", ["I look.", *call(0, "ping"), "\nDone."]),
    Transcript("a list", '```tool_call\n[ping(), search(query="```")]\n```', [*call(0, "ping"), *call(1, "search", '{"query": "```"}')]),
    Transcript("two lines", "```tool_code\nping()\nsearch(tags=['a'])\n```\n", [*call(0, "ping"), *call(1, "search", '{"tags": ["a"]}')]),
    Transcript("code", "```tool_code\nx = 1\n```", ["```tool_code\nx = 1\n```"]),
    Transcript("cut in a block", "```tool_code\nsearch(query='a", broken(0, "search", '{"query": "a', "```tool_code\nsearch(query='a")),
    Transcript("cut before the end", "```tool_code\nping()\n``", call(0, "ping")),
    Transcript(
        "a call",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        call(0, "get_weather", '{"city": "Paris"}'),
    ),
    Transcript(
        "nested",
        '<start_function_call>call:search{filters:{a:[1,<escape>x,y}<escape>],b:{}},query:<escape>"{}"<escape>,exact:true}<end_function_call>',
        call(0, "search", '{"filters": {"a": [1, "x,y}"], "b": {}}, "query": "\\"{}\\"", "exact": true}'),
    ),
    Transcript(
        "two calls",
        "<start_function_call>call:ping{}<end_function_call><start_function_call>call:search{query:<escape>é🙂<escape>}<end_function_call>",
        [*call(0, "ping"), *call(1, "search", '{"query": "é🙂"}')],
    ),
    Transcript("unknown tool", "<start_function_call>call:launch{n:-1}<end_function_call>", call(0, "launch", '{"n": -1}')),
    Transcript(
        "cut in a value",
        "<start_function_call>call:search{query:<escape>ab",
        broken(0, "search", '{"query": "ab', "<start_function_call>call:search{query:<escape>ab"),
    ),
    Transcript("cut in the name", "<start_function_call>call:sea", ["<start_function_call>call:sea"]),
    Transcript("not a call", "<start_function_call>ping()<end_function_call>", ["<start_function_call>ping()<end_function_call>"]),
    Transcript(
        "a bare value",
        "<start_function_call>call:search{query:a b}<end_function_call>",
        [
            *broken(0, "search", '{"query": ', "<start_function_call>call:search{query:a"),
            " b}<end_function_call>",
        ],
    ),
]
