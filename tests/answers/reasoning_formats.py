"""The formats of reasoning."""

from __future__ import annotations

from answers.transcript import Transcript, call
from penstock.text.output import Reasoning

THINK = [
    Transcript("no reasoning", "Hello. 5 < 6", ["Hello. 5 < 6"]),
    Transcript("reasoning", "<think>\nHm, 5 < 6.\n\nSo.\n</think>\n\nHello.\n", [Reasoning("Hm, 5 < 6.\n\nSo."), "Hello.\n"]),
    Transcript("begun by the prompt", "Hm.\n</think>\n\nHello.", [Reasoning("Hm."), "Hello."], inside=True),
    Transcript("begun by both", "\n<think>\nHm.</think>Hello.", [Reasoning("Hm."), "Hello."], inside=True),
    Transcript("empty", "<think>\n\n</think>\n\nHello.", ["Hello."]),
    Transcript("empty, begun by the prompt", "</think>Hello.", ["Hello."], inside=True),
    Transcript("space before", "\n <think>Hm.</think> Hello.", [Reasoning("Hm."), "Hello."]),
    Transcript("never closed", "<think>Hm, that", [Reasoning("Hm, that")]),
    Transcript("cut in the end", "<think>Hm.</thi", [Reasoning("Hm.</thi")]),
    Transcript("cut in the beginning", "<thi", ["<thi"]),
    Transcript("in the middle it is text", "The tag <think> opens, </think> closes.", ["The tag <think> opens, </think> closes."]),
    Transcript("nothing after it", "<think>Hm.</think>\n\n", [Reasoning("Hm.")]),
    Transcript("twice", "<think>Hm.</think>\n<think>So.</think>\nHello.", [Reasoning("Hm.So."), "Hello."]),
    Transcript("the tag within", "<think>a <think> b</think>c", [Reasoning("a <think> b"), "c"]),
    Transcript("unicode", "<think>名前 🙂</think>é🙂", [Reasoning("名前 🙂"), "é🙂"]),
    Transcript("space without reasoning", "\n\n  Hello.", ["\n\n  Hello."]),
    Transcript("only space", "\n\n", ["\n\n"]),
    Transcript(
        "a call after it",
        '<think>Hm.</think>\n\nOk.\n<tool_call>{"name": "ping"}</tool_call>',
        [Reasoning("Hm."), "Ok.", *call(0, "ping")],
        tools="hermes",
    ),
    Transcript(
        "a call within it",
        '<think><tool_call>{"name": "ping"}</tool_call>',
        [Reasoning('<tool_call>{"name": "ping"}</tool_call>')],
        tools="hermes",
    ),
]

THINK_IMPLIED = [
    Transcript("closed", "Hm.\n</think>\n\nHello.", [Reasoning("Hm."), "Hello."], inside=True),
    Transcript("opened and closed", "<think>Hm.</think>Hello.", [Reasoning("Hm."), "Hello."], inside=True),
    Transcript("never closed", "Hello.", [Reasoning("Hello.")], inside=True),
    Transcript("at once", "</think>\nHello.", ["Hello."], inside=True),
    Transcript("cut in the end", "Hm.\n</thin", [Reasoning("Hm.\n</thin")], inside=True),
    Transcript("space first", "\n\n Hm.</think>", [Reasoning("Hm.")], inside=True),
    Transcript("a second end is text", "a</think>b</think>c", [Reasoning("a"), "b</think>c"], inside=True),
    Transcript("unicode", "🙂</think>名", [Reasoning("🙂"), "名"], inside=True),
    Transcript("lines", "a\n\nb\n c\n</think>\nd\n\ne\n", [Reasoning("a\n\nb\n c"), "d\n\ne\n"], inside=True),
    Transcript("closed by the prompt", "Hello.", ["Hello."]),
    Transcript(
        "a call after it",
        'a</think><tool_call>{"name": "ping"}</tool_call>',
        [Reasoning("a"), *call(0, "ping")],
        tools="hermes",
        inside=True,
    ),
    Transcript("nothing after it", "Hm. </think>\n", [Reasoning("Hm.")], inside=True),
    Transcript("angles", "a < b << c </ think></think>d", [Reasoning("a < b << c </ think>"), "d"], inside=True),
]

MISTRAL_THINK = [
    Transcript("no reasoning", "Hello [1].", ["Hello [1]."]),
    Transcript("reasoning", "[THINK]Hm.[/THINK]Hello.", [Reasoning("Hm."), "Hello."]),
    Transcript("space around", " [THINK]\nHm.\n[/THINK]\n\nHello.", [Reasoning("Hm."), "Hello."]),
    Transcript("begun by the prompt", "Hm [x].[/THINK]Hello.", [Reasoning("Hm [x]."), "Hello."], inside=True),
    Transcript("empty", "[THINK][/THINK]Hello.", ["Hello."]),
    Transcript("never closed", "[THINK]Hm [/", [Reasoning("Hm [/")]),
    Transcript("cut in the beginning", "[THI", ["[THI"]),
    Transcript("in the middle it is text", "The [THINK] tag.", ["The [THINK] tag."]),
    Transcript("unicode", "[THINK]é🙂[/THINK]名", [Reasoning("é🙂"), "名"]),
    Transcript("brackets", "[THINK][[/THIN]][/THINK]]", [Reasoning("[[/THIN]]"), "]"]),
    Transcript("a call after it", "[THINK]Hm.[/THINK][TOOL_CALLS]ping[ARGS]{}", [Reasoning("Hm."), *call(0, "ping")], tools="mistral"),
    Transcript("lines", "[THINK]a\n\nb[/THINK]c\n\nd", [Reasoning("a\n\nb"), "c\n\nd"]),
]

GRANITE_THINK = [
    Transcript("no reasoning", "Here is what I think: no.", ["Here is what I think: no."]),
    Transcript("reasoning", "Here is my thought process:\nHm.\n\nHere is my response:\nHello.", [Reasoning("Hm."), "Hello."]),
    Transcript("shorter", "Here's my thought process: Hm. Here's my response: Hello.", [Reasoning("Hm."), "Hello."]),
    Transcript("mixed", "Here is my thought process: Hm. Here's my response: Hello.", [Reasoning("Hm."), "Hello."]),
    Transcript("never closed", "Here is my thought process: Hm. Here is my", [Reasoning("Hm. Here is my")]),
    Transcript("cut in the beginning", "Here is my thou", ["Here is my thou"]),
    Transcript("the beginning of the beginning", "Here is my response: Hello.", ["Here is my response: Hello."]),
    Transcript("begun by the prompt", "Hm.\nHere is my response: Hello.", [Reasoning("Hm."), "Hello."], inside=True),
    Transcript("empty", "Here is my thought process: Here is my response: Hello.", ["Hello."]),
    Transcript("in the middle it is text", "So: Here is my thought process: Hm.", ["So: Here is my thought process: Hm."]),
    Transcript("unicode", "Here is my thought process: 🙂 Here is my response: é", [Reasoning("🙂"), "é"]),
    Transcript("almost", "Here is my thought process: Here is my respite. Here is my response: x", [Reasoning("Here is my respite."), "x"]),
    Transcript(
        "a call after it",
        'Here is my thought process: a Here is my response: b <|tool_call|>[{"name": "ping"}]',
        [Reasoning("a"), "b", *call(0, "ping")],
        tools="granite",
    ),
]
