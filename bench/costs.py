"""Measures that reading costs in proportion to what is read: 16 times the input takes about 16 times the CPU time.

    python bench/costs.py               all cases
    python bench/costs.py openings …    some cases

A cost that grows with the square of the input would let one client stop the server. The CPU time of this process is compared, best of
several runs. Exits with 1 when a case costs more than MAX_RATIO times as much, or when the default model's tokenizer loads too slowly.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from penstock.api.anthropic.conversation import Conversation
from penstock.api.anthropic.schema import Message, MessagesRequest, Role
from penstock.backends.http.sse import EventReader
from penstock.engine.checkpoints.checkpoint import find_default_model
from penstock.media.fetch import read_headers
from penstock.media.hosts import MAX_URL_CHARACTERS, parse_url
from penstock.stream.slot import Slot
from penstock.text.formats.make import make_parser
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.wire.errors import RequestError
from penstock.wire.messages import Delta

TIMES = 16
MAX_RATIO = 24.0
# Below this the clock and the caches decide.
IGNORED_SECONDS = 0.05
MAX_LOAD_SECONDS = 3.0
RUNS = 3
CHARACTERS = 10_000

TOOLS = {
    "search": {"type": "object", "properties": {"query": {"type": "string"}, "tags": {"type": "array"}}},
    "ping": {"type": "object", "properties": {}},
}
# A tool format, how the answer begins, and what it then repeats.
ANSWERS: Mapping[str, tuple[str, str, str]] = {
    "text": ("hermes", "", "x"),
    "whitespace": ("hermes", "x", "\n"),
    "beginnings of markers": ("hermes", "", "<"),
    "whitespace where a call begins": ("llama3_json", "", " "),
    "a string": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": "', "x"),
    "arguments before the name": ("hermes", '<tool_call>{"arguments": {"a": "', "x"),
    "whitespace in JSON": ("hermes", '<tool_call>{"name": "ping", "arguments": {', " "),
    "digits": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": ', "1"),
    "brackets": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": ', "["),
    "openings": ("hermes", "", "<tool_call>"),
    "calls": ("hermes", "", '<tool_call>{"name": "ping"}'),
    "a value of a tag": ("qwen3_coder", "<tool_call><function=search><parameter=query>", "x"),
    "a value of a tag, held": ("qwen3_coder", "<tool_call><function=search><parameter=tags>", "["),
    "newlines in a tag": ("qwen3_coder", "<tool_call><function=search><parameter=query>", "\n"),
    "beginnings of an end": ("qwen3_coder", "<tool_call><function=search><parameter=query>", "</param"),
    "a name": ("mistral", "[TOOL_CALLS]", "x"),
    "a word": ("pythonic", "[", "x"),
    "a literal": ("pythonic", "[search(query='", "\\x41"),
    "lists": ("pythonic", "[search(tags=", "["),
    "messages": ("harmony", "", "<|channel|>final<|message|>x<|end|>"),
}

Case = Callable[[int], Callable[[], None]]
"""Makes the input, this many times the small one; what it returns reads it."""


def parse_answer(tools: str, start: str, more: str, times: int) -> Callable[[], None]:
    """One character at a time, as slow tokens would come."""
    text = start + more * (times * CHARACTERS // len(more))
    parser = make_parser(tools, None, TOOLS, inside_reasoning=False)
    assert parser is not None

    def read() -> None:
        for character in text:
            parser.feed(character)
        parser.finish()

    return read


def join_messages(role: Role, times: int) -> Callable[[], None]:
    """Messages of one role in a row become one."""
    texts = [f"{number} " + "x" * 1000 for number in range(times * 1000)]
    messages = msgspec.convert([{"role": "user", "content": "Hi"}, *({"role": role, "content": text} for text in texts)], list[Message])
    request = MessagesRequest(model="m", max_tokens=1, messages=messages)
    return lambda: None if Conversation(request).messages else sys.exit("no messages")


def read_event_in_pieces(times: int) -> Callable[[], None]:
    """One event of many pieces: each piece is searched once."""
    return partial(read_events, [b"data: ", *[b"x" * 1000] * (times * 300), b"\n\n"], 1)


def read_events_at_once(times: int) -> Callable[[], None]:
    """One piece with many events: each is searched once."""
    count = times * 1000
    return partial(read_events, [(b"data: " + b"x" * 200 + b"\n\n") * count], count)


def read_events(pieces: list[bytes], expected: int) -> None:
    reader = EventReader(2**26)
    assert sum(len(reader.feed(piece)) for piece in pieces) == expected


def leave_tokens(times: int) -> Callable[[], None]:
    """Tokens that nobody takes: they are merged where they wait."""
    deltas = [Delta(offset, (offset,)) for offset in range(times * 10_000)]

    def put() -> None:
        slot = Slot()
        for delta in deltas:
            slot.put(delta)
        slot.take()

    return put


def read_header(times: int) -> Callable[[], None]:
    """A header of an image's server."""
    line = b"a: x" + b" " * (times * CHARACTERS // 5) + b"y"
    return lambda: None if read_headers([line]) else sys.exit("no header")


def refuse_urls(times: int) -> Callable[[], None]:
    """Of the images of a request."""
    url = "http:" + "\\" * (times * (MAX_URL_CHARACTERS - 10) // TIMES)

    def refuse() -> None:
        for _ in range(100):
            with contextlib.suppress(RequestError):
                parse_url(url)

    return refuse


CASES: Mapping[str, Case] = {
    **{name: partial(parse_answer, *answer) for name, answer in ANSWERS.items()},
    "messages of the user": partial(join_messages, "user"),
    "messages of the assistant": partial(join_messages, "assistant"),
    "messages of the system": partial(join_messages, "system"),
    "an event in pieces": read_event_in_pieces,
    "events at once": read_events_at_once,
    "tokens that nobody takes": leave_tokens,
    "spaces in a header": read_header,
    "backslashes in a URL": refuse_urls,
}


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def best(case: Case, times: int) -> float:
    return min(cpu_seconds(case(times)) for _ in range(RUNS))


def measure(name: str, case: Case) -> bool:
    small, large = best(case, 1), best(case, TIMES)
    is_linear = large <= MAX_RATIO * small + IGNORED_SECONDS
    print(f"{'ok  ' if is_linear else 'MISS'} {name:32} {small * 1000:8.1f} ms, {TIMES} times the input {large * 1000:8.1f} ms", flush=True)
    return is_linear


def measure_loading() -> bool:
    taken = cpu_seconds(lambda: pack_tokenizer(find_default_model()).load())
    print(f"{'ok  ' if taken < MAX_LOAD_SECONDS else 'MISS'} the default model's tokenizer loads in {taken:.2f} CPU-s")
    return taken < MAX_LOAD_SECONDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="(default: all)")
    chosen = parser.parse_args().cases or list(CASES)
    results = [measure(name, CASES[name]) for name in chosen]
    return 0 if all([*results, measure_loading()]) else 1


if __name__ == "__main__":
    sys.exit(main())
