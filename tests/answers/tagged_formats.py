"""`qwen3_coder`, `minimax_m2`, `deepseek_v32`, `glm45`: a tag a parameter."""

from __future__ import annotations

from answers.transcript import Transcript, broken, call
from penstock.text.output import Reasoning

QWEN3_CODER = [
    Transcript("plain", "if a <b: <function> </tool_call>", ["if a <b: <function> </tool_call>"]),
    Transcript(
        "one call",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nNew York\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        call(0, "get_weather", '{"city": "New York", "days": 3}'),
    ),
    Transcript(
        "two calls, text before",
        "First.\n<tool_call>\n<function=ping>\n</function>\n</tool_call>\n<tool_call>\n<function=search>\n<parameter=query>\nx\n</parameter>\n</function>\n</tool_call>\n",
        ["First.", *call(0, "ping"), *call(1, "search", '{"query": "x"}')],
    ),
    Transcript(
        "code as a value",
        '<tool_call><function=search><parameter=query>\n\ndef f():\n\treturn "</b>" \\ {1}\n\n</parameter></function></tool_call>',
        call(0, "search", '{"query": "\\ndef f():\\n\\treturn \\"</b>\\" \\\\ {1}\\n"}'),
    ),
    Transcript(
        "values by their types",
        '<tool_call><function=search><parameter=filters>\n{"a": [1, "x"]}\n</parameter>'
        '<parameter=tags>["b"]</parameter><parameter=exact>\nTrue\n</parameter></function></tool_call>',
        call(0, "search", '{"filters": {"a": [1, "x"]}, "tags": ["b"], "exact": true}'),
    ),
    Transcript(
        "values that are none of their type",
        "<tool_call><function=search><parameter=filters>{a}</parameter>"
        "<parameter=tags>b, c</parameter><parameter=exact>maybe</parameter></function></tool_call>",
        call(0, "search", '{"filters": "{a}", "tags": "b, c", "exact": "maybe"}'),
    ),
    Transcript(
        "numbers as strings, null and either",
        "<tool_call><function=get_weather><parameter=city>42</parameter><parameter=unit>null</parameter><parameter=unit>5</parameter></function></tool_call>",
        call(0, "get_weather", '{"city": "42", "unit": null, "unit": "5"}'),
    ),
    Transcript(
        "unknown tool",
        "<tool_call><function=launch><parameter=a>5</parameter><parameter=b>x y</parameter>"
        '<parameter=c>{"d": 1}</parameter><parameter=e>"q"</parameter></function></tool_call>',
        call(0, "launch", '{"a": 5, "b": "x y", "c": {"d": 1}, "e": "\\"q\\""}'),
    ),
    Transcript("without the outer tag", "Ok\n<function=ping>\n</function>\n</tool_call>", ["Ok", *call(0, "ping")]),
    Transcript(
        "empty value",
        "<tool_call><function=search><parameter=query>\n</parameter></function></tool_call>",
        call(0, "search", '{"query": ""}'),
    ),
    Transcript(
        "unicode",
        "<tool_call><function=search><parameter=query>\n名前 🙂 \\u00e9\n</parameter></function></tool_call>",
        call(0, "search", '{"query": "名前 🙂 \\\\u00e9"}'),
    ),
    Transcript("cut in the name", "Ok\n<tool_call>\n<function=get_", ["Ok\n<tool_call>\n<function=get_"]),
    Transcript(
        "cut in a string",
        "<tool_call><function=search><parameter=query>\nab\n",
        broken(0, "search", '{"query": "ab', "<tool_call><function=search><parameter=query>\nab\n"),
    ),
    Transcript(
        "cut in a number",
        "<tool_call><function=get_weather><parameter=days>\n12",
        broken(0, "get_weather", '{"days": ', "<tool_call><function=get_weather><parameter=days>\n12"),
    ),
    Transcript(
        "cut before the end of the function",
        "<tool_call><function=ping>\n</func",
        broken(0, "ping", "", "<tool_call><function=ping>\n</func"),
    ),
    Transcript("cut after the function", "<tool_call><function=ping></function>\n", call(0, "ping")),
    Transcript("JSON in the tag", '<tool_call>{"name": "ping"}</tool_call>', ['<tool_call>{"name": "ping"}</tool_call>']),
    Transcript(
        "text between parameters",
        "<tool_call><function=ping>so</function></tool_call>",
        [*broken(0, "ping", "", "<tool_call><function=ping>"), "so</function></tool_call>"],
    ),
    Transcript(
        "reasoning before",
        "<think>\n<function=x>\n</think>\n<function=ping></function>",
        [Reasoning("<function=x>"), *call(0, "ping")],
        reasoning="think",
    ),
]

M, N = "<minimax:tool_call>", "</minimax:tool_call>"

MINIMAX_M2 = [
    Transcript("plain", "<invoke> is no call, nor is <minimax>", ["<invoke> is no call, nor is <minimax>"]),
    Transcript(
        "one call",
        f'{M}\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n{N}',
        call(0, "get_weather", '{"city": "Oslo", "days": 2}'),
    ),
    Transcript(
        "two calls",
        f'Ok.\n{M}<invoke name="ping"></invoke>\n<invoke name="search"><parameter name="query">a</parameter></invoke>{N}\n',
        ["Ok.", *call(0, "ping"), *call(1, "search", '{"query": "a"}')],
    ),
    Transcript(
        "newlines belong to strings",
        f'{M}<invoke name="search"><parameter name="query">\na\n</parameter></invoke>{N}',
        call(0, "search", '{"query": "\\na\\n"}'),
    ),
    Transcript(
        "JSON values",
        f'{M}<invoke name="search"><parameter name="tags">["<a>", {{"b": 1}}]</parameter>'
        f'<parameter name="exact">false</parameter></invoke>{N}',
        call(0, "search", '{"tags": ["<a>", {"b": 1}], "exact": false}'),
    ),
    Transcript(
        "quotes and backslashes",
        f'{M}<invoke name="search"><parameter name="query">"\\n" </x></parameter></invoke>{N}',
        call(0, "search", '{"query": "\\"\\\\n\\" </x>"}'),
    ),
    Transcript(
        "unicode", f'{M}<invoke name="search"><parameter name="query">🙂é</parameter></invoke>{N}', call(0, "search", '{"query": "🙂é"}')
    ),
    Transcript(
        "unknown tool", f'{M}<invoke name="launch"><parameter name="n">1.5e3</parameter></invoke>{N}', call(0, "launch", '{"n": 1.5e3}')
    ),
    Transcript("cut in the marker", "so <minimax:to", ["so <minimax:to"]),
    Transcript(
        "cut in a key",
        f'{M}<invoke name="search"><parameter name="qu',
        broken(0, "search", "", f'{M}<invoke name="search"><parameter name="qu'),
    ),
    Transcript(
        "cut in a value",
        f'{M}<invoke name="search"><parameter name="query">ab</para',
        broken(0, "search", '{"query": "ab</para', f'{M}<invoke name="search"><parameter name="query">ab</para'),
    ),
    Transcript("cut between calls", f'{M}<invoke name="ping"></invoke>\n', call(0, "ping")),
    Transcript("no invoke", f"{M}ping{N}", [f"{M}ping{N}"]),
    Transcript("garbage after a call", f'{M}<invoke name="ping"></invoke>?{N}', [*call(0, "ping"), f"?{N}"]),
    Transcript(
        "reasoning before",
        f'<think>hm</think>\n\n{M}<invoke name="ping"></invoke>{N}',
        [Reasoning("hm"), *call(0, "ping")],
        reasoning="think",
    ),
]

D, F = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
i, j = "<｜DSML｜invoke name=", "</｜DSML｜invoke>"
p, q = "<｜DSML｜parameter name=", "</｜DSML｜parameter>"

DEEPSEEK_V32 = [
    Transcript("plain", "｜DSML｜ is a word, <｜DSML｜x>", ["｜DSML｜ is a word, <｜DSML｜x>"]),
    Transcript(
        "one call",
        f'{D}\n{i}"get_weather">\n{p}"city" string="true">Bonn{q}\n{p}"days" string="false">3{q}\n{j}\n{F}',
        call(0, "get_weather", '{"city": "Bonn", "days": 3}'),
    ),
    Transcript(
        "two calls",
        f'Hm.\n\n{D}{i}"ping">{j}\n{i}"search">{p}"query" string="true">x{q}{j}{F}',
        ["Hm.", *call(0, "ping"), *call(1, "search", '{"query": "x"}')],
    ),
    Transcript(
        "what the tag says wins",
        f'{D}{i}"get_weather">{p}"days" string="true">3{q}{p}"city" string="false">"a"{q}{j}{F}',
        call(0, "get_weather", '{"days": "3", "city": "a"}'),
    ),
    Transcript(
        "by the schema", f'{D}{i}"get_weather">{p}"days">3{q}{p}"city">3{q}{j}{F}', call(0, "get_weather", '{"days": 3, "city": "3"}')
    ),
    Transcript(
        "nested JSON",
        f'{D}{i}"search">{p}"filters" string="false">{{"a": "}}</", "b": [null]}}{q}{j}{F}',
        call(0, "search", '{"filters": {"a": "}</", "b": [null]}}'),
    ),
    Transcript("not JSON", f'{D}{i}"search">{p}"tags" string="false">[a{q}{j}{F}', call(0, "search", '{"tags": "[a"}')),
    Transcript("the later marker", f'<｜DSML｜tool_calls>{i}"ping">\n\n{j}</｜DSML｜tool_calls>', call(0, "ping")),
    Transcript(
        "string to the letter",
        f'{D}{i}"search">{p}"query" string="true">\n "🙂" \n{q}{j}{F}',
        call(0, "search", '{"query": "\\n \\"🙂\\" \\n"}'),
    ),
    Transcript("unknown tool, text after", f'{D}{i}"launch">{j}{F} Done', [*call(0, "launch"), " Done"]),
    Transcript("cut in the name", f'ok {D}{i}"pi', [f'ok {D}{i}"pi']),
    Transcript(
        "cut in a value",
        f'{D}{i}"search">{p}"query" string="true">a',
        broken(0, "search", '{"query": "a', f'{D}{i}"search">{p}"query" string="true">a'),
    ),
    Transcript("cut in the end", f'{D}{i}"ping">{j}</｜DSML｜func', call(0, "ping")),
    Transcript("no invoke", f"{D} nothing {F}", [f"{D} nothing {F}"]),
    Transcript("reasoning before", f'hm</think>{D}{i}"ping">{j}{F}', [Reasoning("hm"), *call(0, "ping")], reasoning="think", inside=True),
]

GLM45 = [
    Transcript("plain", "a <tool> and <arg_key>", ["a <tool> and <arg_key>"]),
    Transcript(
        "one call",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Graz</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        call(0, "get_weather", '{"city": "Graz", "days": 2}'),
    ),
    Transcript(
        "without newlines",
        "<tool_call>search<arg_key>query</arg_key><arg_value>a</arg_value></tool_call>",
        call(0, "search", '{"query": "a"}'),
    ),
    Transcript(
        "two calls",
        "Ok.\n<tool_call>ping\n</tool_call>\n<tool_call>ping</tool_call>\nDone",
        ["Ok.", *call(0, "ping"), *call(1, "ping"), "\nDone"],
    ),
    Transcript("a newline first", "<tool_call>\nping\n</tool_call>", call(0, "ping")),
    Transcript(
        "JSON values",
        '<tool_call>search\n<arg_key>tags</arg_key>\n<arg_value>["a", {"b": "</c>"}]</arg_value>\n</tool_call>',
        call(0, "search", '{"tags": ["a", {"b": "</c>"}]}'),
    ),
    Transcript(
        "strings stay strings",
        '<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>{"a": 1}</arg_value>\n</tool_call>',
        call(0, "search", '{"query": "{\\"a\\": 1}"}'),
    ),
    Transcript(
        "unicode",
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>名\n🙂</arg_value>\n</tool_call>",
        call(0, "search", '{"query": "名\\n🙂"}'),
    ),
    Transcript(
        "unknown tool",
        "<tool_call>launch\n<arg_key>a b</arg_key>\n<arg_value>yes</arg_value>\n</tool_call>",
        call(0, "launch", '{"a b": "yes"}'),
    ),
    Transcript("cut in the name", "x\n<tool_call>get", ["x\n<tool_call>get"]),
    Transcript(
        "cut in a value",
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>ab</arg",
        broken(0, "search", '{"query": "ab</arg', "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>ab</arg"),
    ),
    Transcript("cut before the end", "<tool_call>ping\n", broken(0, "ping", "", "<tool_call>ping\n")),
    Transcript("a sentence", "<tool_call>I am not sure.\n</tool_call>", ["<tool_call>I am not sure.\n</tool_call>"]),
    Transcript(
        "a key without a value",
        "<tool_call>ping\n<arg_key>a</arg_key>\n</tool_call>",
        [*broken(0, "ping", "", "<tool_call>ping\n<arg_key>a</arg_key>\n"), "</tool_call>"],
    ),
    Transcript(
        "reasoning before", "\n<think>hm</think>\n<tool_call>ping\n</tool_call>", [Reasoning("hm"), *call(0, "ping")], reasoning="think"
    ),
]
