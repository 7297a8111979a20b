"""`mistral`, `deepseek_v3`, `kimi_k2`: a name and then JSON."""

from __future__ import annotations

from answers.transcript import Transcript, broken, call
from penstock.text.output import Reasoning

MISTRAL = [
    Transcript("plain", "An array [1, 2] and [TOOL].", ["An array [1, 2] and [TOOL]."]),
    Transcript("one call in a list", '[TOOL_CALLS] [{"name": "ping", "arguments": {"a": 1}}]', call(0, "ping", '{"a": 1}')),
    Transcript(
        "two in a list, with ids",
        '[TOOL_CALLS][{"name": "ping", "arguments": {}, "id": "abcdefghi"}, {"name": "search", "arguments": {"query": "[ARGS]"}}]',
        [*call(0, "ping"), *call(1, "search", '{"query": "[ARGS]"}')],
    ),
    Transcript("a name", '[TOOL_CALLS]get_weather[ARGS]{"city": "Nice"}', call(0, "get_weather", '{"city": "Nice"}')),
    Transcript("a name without a marker", '[TOOL_CALLS]get_weather{"city": "Nice"}', call(0, "get_weather", '{"city": "Nice"}')),
    Transcript("a name and an id", "[TOOL_CALLS]ping[CALL_ID]123456789[ARGS]{}", call(0, "ping", "{}", "123456789")),
    Transcript(
        "two names",
        'Now:\n[TOOL_CALLS]ping[ARGS]{}[TOOL_CALLS]search[ARGS]{"query": "{\\"a\\": [}"}',
        ["Now:", *call(0, "ping"), *call(1, "search", '{"query": "{\\"a\\": [}"}')],
    ),
    Transcript("space between", "[TOOL_CALLS]ping[ARGS] {}\n[TOOL_CALLS] ping [ARGS]{}\n", [*call(0, "ping"), *call(1, "ping")]),
    Transcript("text after", "[TOOL_CALLS]ping[ARGS]{} done", [*call(0, "ping"), " done"]),
    Transcript("unknown tool", '[TOOL_CALLS]launch[ARGS]{"ü": "名"}', call(0, "launch", '{"ü": "名"}')),
    Transcript("cut in the marker", "ok [TOOL_CAL", ["ok [TOOL_CAL"]),
    Transcript("cut in the name", "ok [TOOL_CALLS]get_wea", ["ok [TOOL_CALLS]get_wea"]),
    Transcript(
        "cut in the arguments",
        '[TOOL_CALLS]ping[ARGS]{"a": {"b": -',
        broken(0, "ping", '{"a": {"b": ', '[TOOL_CALLS]ping[ARGS]{"a": {"b": -'),
    ),
    Transcript("arguments that are none", "[TOOL_CALLS]ping[ARGS]none", broken(0, "ping", "", "[TOOL_CALLS]ping[ARGS]none")),
    Transcript(
        "too long for a name",
        f"[TOOL_CALLS]{'x' * 300}[TOOL_CALLS]ping{' ' * 400}[ARGS]{{}}",
        [f"[TOOL_CALLS]{'x' * 300}[TOOL_CALLS]ping{' ' * 400}[ARGS]{{}}"],
    ),
    Transcript("words after the marker", "[TOOL_CALLS]I would call ping now", ["[TOOL_CALLS]I would call ping now"]),
    Transcript(
        "reasoning before",
        "[THINK]So [TOOL_CALLS] it is.[/THINK][TOOL_CALLS]ping[ARGS]{}",
        [Reasoning("So [TOOL_CALLS] it is."), *call(0, "ping")],
        reasoning="mistral",
    ),
]

B, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
b, s, e = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
V3 = f"{b}function{s}"

DEEPSEEK_V3 = [
    Transcript("plain", "a<b and <｜tool", ["a<b and <｜tool"]),
    Transcript("fenced", f'{B}{V3}ping\n```json\n{{"a": 1}}\n```{e}{E}', call(0, "ping", '{"a": 1}')),
    Transcript(
        "two fenced",
        f'Let me.\n{B}{V3}ping\n```json\n{{}}\n```{e}\n{V3}search\n```json\n{{"query": "```"}}\n```{e}{E}',
        ["Let me.", *call(0, "ping"), *call(1, "search", '{"query": "```"}')],
    ),
    Transcript("not fenced", f'{B}{b}ping{s}{{"a": 1}}{e}{E}', call(0, "ping", '{"a": 1}')),
    Transcript(
        "two not fenced",
        f'{B}{b}ping{s}{{}}{e}{b}search{s}{{"query": "}}é🙂"}}{e}{E}',
        [*call(0, "ping"), *call(1, "search", '{"query": "}é🙂"}')],
    ),
    Transcript("nothing for arguments", f"{B}{b}ping{s}{e}{E}", call(0, "ping")),
    Transcript("a tool named function", f'{B}{b}function{s}{{"a": 1}}{e}{E}', call(0, "function", '{"a": 1}')),
    Transcript("unknown tool, text after", f"{B}{b}launch{s}{{}}{e}{E}\nDone", [*call(0, "launch"), "\nDone"]),
    Transcript("cut in the name", f"ok {B}{b}pin", [f"ok {B}{b}pin"]),
    Transcript(
        "cut in a fence",
        f'{B}{V3}search\n```json\n{{"query": "a',
        broken(0, "search", '{"query": "a', f'{B}{V3}search\n```json\n{{"query": "a'),
    ),
    Transcript("cut before the end of the fence", f"{B}{V3}ping\n```json\n{{}}\n``", call(0, "ping")),
    Transcript("cut before the end", f"{B}{b}ping{s}{{}}{e}", call(0, "ping")),
    Transcript("no call in it", f"{B}none{E}", [f"{B}none{E}"]),
    Transcript("broken", f'{B}{b}ping{s}{{"a": "\\x"}}{e}{E}', [*broken(0, "ping", '{"a": "', f'{B}{b}ping{s}{{"a": "'), f'\\x"}}{e}{E}']),
    Transcript("garbage between", f"{B}{b}ping{s}{{}}{e} and {b}ping{s}{{}}{e}{E}", [*call(0, "ping"), f" and {b}ping{s}{{}}{e}{E}"]),
    Transcript(
        "reasoning before", f"hm\n</think>\n\n{B}{b}ping{s}{{}}{e}{E}", [Reasoning("hm"), *call(0, "ping")], reasoning="think", inside=True
    ),
]

KB, KE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
kb, ka, ke = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

KIMI_K2 = [
    Transcript("plain", "5 <| 6 |> 7", ["5 <| 6 |> 7"]),
    Transcript("one call", f'{KB}{kb}functions.ping:0{ka}{{"a": 1}}{ke}{KE}', call(0, "ping", '{"a": 1}', "functions.ping:0")),
    Transcript(
        "two calls",
        f'I look.\n{KB}{kb}functions.ping:3{ka}{{}}{ke}{kb}functions.search:4{ka}{{"query": "<|tool_call_end|>"}}{ke}{KE}',
        ["I look.", *call(0, "ping", "{}", "functions.ping:3"), *call(1, "search", '{"query": "<|tool_call_end|>"}', "functions.search:4")],
    ),
    Transcript("space within", f"{KB} {kb} functions.ping:0 {ka} {{}} {ke} {KE} ", call(0, "ping", "{}", "functions.ping:0")),
    Transcript("a name alone", f"{KB}{kb}ping{ka}{{}}{ke}{KE}", call(0, "ping", "{}", "ping")),
    Transcript("a name with dots", f"{KB}{kb}functions.fs.read:12{ka}{{}}{ke}{KE}", call(0, "fs.read", "{}", "functions.fs.read:12")),
    Transcript("nothing for arguments", f"{KB}{kb}functions.ping:0{ka}{ke}{KE}", call(0, "ping", "{}", "functions.ping:0")),
    Transcript(
        "arguments in a string",
        f'{KB}{kb}functions.ping:0{ka}"{{\\"a\\": \\"名\\"}}"{ke}{KE}',
        call(0, "ping", '{"a": "名"}', "functions.ping:0"),
    ),
    Transcript("cut in the id", f"ok{KB}{kb}functions.pi", [f"ok{KB}{kb}functions.pi"]),
    Transcript(
        "cut in arguments",
        f'{KB}{kb}functions.ping:0{ka}{{"a": [',
        broken(0, "ping", '{"a": [', f'{KB}{kb}functions.ping:0{ka}{{"a": [', "functions.ping:0"),
    ),
    Transcript("cut in the end", f"{KB}{kb}functions.ping:0{ka}{{}}<|tool_ca", call(0, "ping", "{}", "functions.ping:0")),
    Transcript("no call in it", f"{KB}{KE}!", [f"{KB}{KE}!"]),
    Transcript(
        "broken",
        f"{KB}{kb}functions.ping:0{ka}{{]{ke}{KE}",
        [*broken(0, "ping", "{", f"{KB}{kb}functions.ping:0{ka}{{", "functions.ping:0"), f"]{ke}{KE}"],
    ),
    Transcript("text after", f"{KB}{kb}functions.ping:0{ka}{{}}{ke}{KE} Done.", [*call(0, "ping", "{}", "functions.ping:0"), " Done."]),
    Transcript(
        "within reasoning that is not closed",
        f"I must call. {KB}{kb}functions.ping:0{ka}{{}}{ke}{KE}",
        [Reasoning("I must call."), *call(0, "ping", "{}", "functions.ping:0")],
        reasoning="think",
        inside=True,
    ),
]
