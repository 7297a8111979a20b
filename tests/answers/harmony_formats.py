"""`harmony`: messages in channels."""

from __future__ import annotations

from answers.transcript import Transcript, broken, call
from penstock.text.output import Reasoning

ANALYSIS, FINAL, NEXT = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|><|start|>assistant"
PING = "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>"

HARMONY = [
    Transcript("an answer", f"{FINAL}Hello 🙂.<|return|>", ["Hello 🙂."]),
    Transcript(
        "reasoning and an answer", f"{ANALYSIS}Thinking,\n hard.{NEXT}{FINAL} Hello.\n", [Reasoning("Thinking,\n hard."), " Hello.\n"]
    ),
    Transcript("a call", f'{ANALYSIS}I ping.{NEXT}{PING}{{"a": 1}}<|call|>', [Reasoning("I ping."), *call(0, "ping", '{"a": 1}')]),
    Transcript("a call without its end", f'{PING}{{"a": "<b> }}"}}', call(0, "ping", '{"a": "<b> }"}')),
    Transcript(
        "the recipient first",
        f'{ANALYSIS}Hm.{NEXT} to=functions.search<|channel|>commentary json<|message|>{{"query": "名\\u00e9"}}<|call|>',
        [Reasoning("Hm."), *call(0, "search", '{"query": "名\\u00e9"}')],
    ),
    Transcript("the recipient at the very beginning", " to=functions.ping<|channel|>commentary<|message|>{}<|call|>", call(0, "ping")),
    Transcript("a preamble", f"<|channel|>commentary<|message|>I will ping.{NEXT}{PING}{{}}<|call|>", ["I will ping.", *call(0, "ping")]),
    Transcript("two calls", f"{PING}{{}}<|call|><|start|>assistant{PING}{{}}<|call|>", [*call(0, "ping"), *call(1, "ping")]),
    Transcript("nothing for arguments", f"{PING}<|call|>", call(0, "ping")),
    Transcript("unknown tool", "<|channel|>commentary to=functions.launch<|message|>{}<|call|>", call(0, "launch")),
    Transcript(
        "a tool of its own",
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
        call(0, "browser.search", '{"query": "x"}'),
    ),
    Transcript(
        "code for a tool",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        [
            *broken(0, "python", "", "<|channel|>analysis to=python code<|message|>"),
            "print(1)<|call|>",
        ],
    ),
    Transcript("cut in the reasoning", f"{ANALYSIS}I thi", [Reasoning("I thi")]),
    Transcript("cut in a marker", f"{ANALYSIS}I thi<|en", [Reasoning("I thi<|en")]),
    Transcript("cut in a header", f"{ANALYSIS}Hm.{NEXT}<|channel|>comm", [Reasoning("Hm."), "<|start|>assistant<|channel|>comm"]),
    Transcript("cut in the arguments", f'{PING}{{"a": 1', broken(0, "ping", '{"a": ', f'{PING}{{"a": 1')),
    Transcript("no channel", "Just text, a < b.", ["Just text, a < b."]),
    Transcript("text, then a channel", f"So.\n{FINAL}Hello.", ["So.\nHello."]),
    Transcript("without an end between", f"{ANALYSIS}Hm.<|start|>assistant{FINAL}Hello.", [Reasoning("Hm."), "Hello."]),
    Transcript("without tools", f"{ANALYSIS}Hm.{NEXT}{PING}{{}}<|call|>", [Reasoning("Hm."), "{}"], schemas={}),
    Transcript("inside its reasoning", f"goes on.{NEXT}{FINAL}Hello.", [Reasoning("goes on."), "Hello."], inside=True),
    Transcript("a header without an end", "<|channel|>" + "x" * 500, ["<|channel|>" + "x" * 500]),
    Transcript("broken arguments", f"{PING}{{a}}<|call|>", [*broken(0, "ping", "{", f"{PING}{{"), "a}<|call|>"]),
]
