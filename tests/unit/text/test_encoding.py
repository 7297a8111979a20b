"""Long texts are tokenized in threads. Their tokens stay the same, whatever happens to their session in the meantime."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors

from penstock.text import encoding
from penstock.text.encoding import MAX_REST_SECONDS, REST_SECONDS, Encoder, Steps, at_once, rest_seconds
from penstock.text.tokenizers.cuts import CUT, MAX_SLICE, SLICE, slices
from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, Tokenizer
from penstock.text.tokenizers.words import WordTokenizer
from penstock.text.transcript import MAX_BRANCHES, Transcripts
from penstock.wire.errors import RequestError
from tokenizer_kinds import KINDS, byte_level, chat, encode_chat, smollm, tokenizer_of

PLENTY = 1 << 30
WORDS = "water flows größer 日本 水。 don't I'm THE x1 12 3.14 , . ; ! ? (a) Straße вода, 한국어 e\u0301 😀 <|im_end|> ' a_b http://x.y/z"
FRAGMENTS = [*WORDS.split(" "), "\n", "\n\n", "\t"]
SLICED = ("smollm", "llama3", "qwen", "uncut")


def long_text(seed: int, length: int = 3 * SLICE) -> str:
    chooser = random.Random(seed)
    pieces: list[str] = []
    size = 0
    while size < length:
        pieces.append(chooser.choice(FRAGMENTS) + chooser.choice(["", " ", " ", "  "]))
        size += len(pieces[-1])
    return "".join(pieces)


def flat(pieces: Iterator[Sequence[int]]) -> list[int]:
    return [token_id for piece in pieces for token_id in piece]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_steps_make_the_tokens_of_the_whole(kind: str, seed: int) -> None:
    tokenizer = tokenizer_of(kind)
    text = long_text(seed)
    steps = list(tokenizer.encode_part_steps(text))
    assert flat(iter(steps)) == tokenizer.encode_part(text)
    assert flat(tokenizer.encode_steps(text)) == tokenizer.encode(text)
    assert (len(steps) > 1) == (kind in (*SLICED, "WordTokenizer"))


@settings(max_examples=200)
@given(text=st.lists(st.sampled_from([*FRAGMENTS, " ", "  ", "\n"]), max_size=12).map("".join))
@pytest.mark.parametrize("kind", SLICED)
def test_a_cut_does_not_change_the_tokens(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    whole = tokenizer.encode_part(text)
    for cut in CUT.finditer(text):
        assert [*tokenizer.encode_part(text[: cut.end()]), *tokenizer.encode_part(text[cut.end() :])] == whole


def test_a_text_without_a_place_to_cut_stays_whole() -> None:
    for text in ("x" * 3 * SLICE, "(" * 3 * SLICE, " " * 3 * SLICE, ""):
        assert list(slices(text)) == [text]
    assert [len(piece) for piece in slices("x" * 3 * SLICE + " x")] == [3 * SLICE, 2]


@pytest.mark.parametrize("letter", ["x", "(", " ", "\u6c34", "\U0001f4a7"])
def test_a_very_long_text_without_a_place_to_cut_is_cut_anyway(letter: str) -> None:
    for length in (MAX_SLICE, MAX_SLICE + SLICE, 3 * MAX_SLICE + 1):
        text = letter * length
        pieces = list(slices(text))
        assert "".join(pieces) == text
        assert max(map(len, pieces)) < MAX_SLICE + SLICE
        assert all(pieces)
    tokenizer = tokenizer_of(SLICED[0])
    assert tokenizer.decode([token for piece in tokenizer.encode_steps(text) for token in piece]) == text


def special(**options: Any) -> AddedToken:
    return AddedToken(options.pop("content", "<|im_end|>"), normalized=False, special=True, **options)


@pytest.mark.parametrize("change", ["none", "lstrip", "space", "word.word", "lowercase", "looks back", "keeps lines", "prefix space"])
def test_a_tokenizer_that_could_notice_a_cut_is_not_sliced(change: str) -> None:
    added = {"lstrip": special(lstrip=True), "space": special(content="<im end>"), "word.word": special(content="<im.end>")}
    library = byte_level(["</s>", added.get(change, "<|im_end|>")], prefix_space=change == "prefix space")
    patterns = {"looks back": r"(?<=water) flows|\p{L}+|\s+|[^\s\p{L}]+", "keeps lines": r"[^\n]{1,6}|\n"}
    if change in patterns:
        words = pre_tokenizers.Split(Regex(patterns[change]), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if change == "lowercase":
        library.normalizer = normalizers.Lowercase()
    tokenizer = ModelTokenizer(library, {"eos_token": "</s>"})
    steps = list(tokenizer.encode_part_steps("the water flows " * SLICE))
    assert (len(steps) > 1) == (change == "none")
    assert flat(iter(steps)) == tokenizer.encode_part("the water flows " * SLICE)


def test_a_prompt_in_steps_begins_and_ends_as_a_whole_one() -> None:
    library = byte_level(["<s>", "</s>"])
    around = [(token, library.token_to_id(token)) for token in ("<s>", "</s>")]
    library.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    tokenizer = ModelTokenizer(library, {"eos_token": "</s>"})
    for text in ("", "water", long_text(4)):
        made = flat(tokenizer.encode_steps(text))
        assert made == tokenizer.encode(text)
        assert (made[0], made[-1]) == (around[0][1], around[1][1])


class Watched(WordTokenizer):
    """A word tokenizer that records which threads used it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.running = self.most_running = 0
        self._lock = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def encode(self, text: str) -> list[int]:
        with self._lock:
            self.threads.add(threading.get_ident())
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self.reached.set()
        assert self.gate.wait(10)
        try:
            return super().encode(text)
        finally:
            with self._lock:
                self.running -= 1

    def render_chat(self, prompt: ChatPrompt) -> str:
        self.threads.add(threading.get_ident())
        return super().render_chat(prompt)


async def reached(tokenizer: Watched) -> None:
    assert await asyncio.to_thread(tokenizer.reached.wait, 10)
    tokenizer.reached.clear()


def drive(coroutine: Any) -> Any:
    """The result of a coroutine that must not suspend."""
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def test_short_texts_use_no_thread() -> None:
    tokenizer = Watched()
    transcripts = Transcripts(PLENTY)
    assert drive(transcripts.encoder.encode_text(tokenizer, "hello water")) == tokenizer.encode("hello water")
    for key in ("session", None):
        encoded = drive(transcripts.encode_chat(key, "model", tokenizer, chat("hello", "water")))
        assert encoded.token_ids == tuple(encode_chat(tokenizer, chat("hello", "water")))
    assert tokenizer.threads == {threading.get_ident()}


async def test_long_texts_are_made_in_other_threads() -> None:
    tokenizer = Watched()
    transcripts = Transcripts(PLENTY)
    text = "hello water " * 5_000
    expected = WordTokenizer().encode(text)
    assert await transcripts.encoder.encode_text(tokenizer, text) == expected
    assert threading.get_ident() not in tokenizer.threads
    encoded = await transcripts.encode_chat(None, "model", tokenizer, chat(text * 20))
    assert encoded.token_ids == tuple(encode_chat(WordTokenizer(), chat(text * 20)))
    assert threading.get_ident() not in tokenizer.threads


@pytest.mark.parametrize(
    "prompt",
    [
        ChatPrompt([ChatMessage(role="user", content="x")] * 200),
        ChatPrompt(
            [ChatMessage(role="user", content="x")], tools=[{"function": {"name": "f", "parameters": {str(n): [n] for n in range(2_000)}}}]
        ),
        ChatPrompt([ChatMessage(role="user", content="x")], arguments={"a": "x" * 2_000_000}),
        ChatPrompt(
            [
                ChatMessage(
                    role="assistant",
                    content="",
                    tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "x" * 2_000_000}}],
                )
            ]
        ),
    ],
    ids=["messages", "tools", "arguments", "calls"],
)
async def test_slow_rendering_is_done_in_another_thread(prompt: ChatPrompt) -> None:
    tokenizer = Watched()
    assert await Encoder().render_chat(tokenizer, prompt) == WordTokenizer().render_chat(prompt)
    assert threading.get_ident() not in tokenizer.threads


async def test_only_two_are_made_at_once_and_all_get_their_turns() -> None:
    tokenizer = Watched()
    transcripts = Transcripts(PLENTY)
    texts = [f"hello water {number} " * 20_000 for number in range(6)]
    made = await asyncio.gather(*(transcripts.encoder.encode_text(tokenizer, text) for text in texts))
    assert list(made) == [WordTokenizer().encode(text) for text in texts]
    assert 1 <= tokenizer.most_running <= 2
    assert len(tokenizer.threads) <= 2


async def test_a_long_text_does_not_keep_others_waiting_until_it_ends() -> None:
    encoder = Encoder(threads=1)
    order: list[str] = []

    def work(name: str, count: int) -> Steps[None]:
        for _ in range(count):
            threading.Event().wait(encoding.TURN_SECONDS)
            yield
        order.append(name)

    await asyncio.gather(encoder.run(work("long", 6)), encoder.run(work("short", 1)))
    assert order == ["short", "long"]


async def test_a_tenant_that_floods_does_not_keep_another_one_waiting() -> None:
    encoder = Encoder(threads=1)
    order: list[str] = []

    def work(name: str) -> Steps[None]:
        order.append(name)
        threading.Event().wait(encoding.TURN_SECONDS)
        yield

    flood = [asyncio.create_task(encoder.run(work("flood"), "flood")) for _ in range(20)]
    await asyncio.sleep(0)
    late = [asyncio.create_task(encoder.run(work("late"), "late")) for _ in range(3)]
    await asyncio.gather(*flood, *late)
    assert order[:7].count("late") == 3, "one of each in turn"
    assert (encoder.turns.used, encoder.turns.waiting) == (0, 0)


async def test_work_that_is_cancelled_while_it_waits_leaves_its_turn_to_others() -> None:
    encoder = Encoder(threads=1)
    begun, gate = threading.Event(), threading.Event()
    cancelled: list[str] = []

    def block() -> Steps[None]:
        begun.set()
        gate.wait()
        yield

    def work() -> Steps[None]:
        cancelled.append("it ran")
        yield

    running = asyncio.create_task(encoder.run(block(), "a"))
    await asyncio.to_thread(begun.wait)
    waiting = asyncio.create_task(encoder.run(work(), "a"))
    await asyncio.sleep(0)
    assert encoder.turns.waiting == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    await running
    assert (encoder.turns.used, encoder.turns.waiting, cancelled) == (0, 0, [])


async def test_many_short_texts_are_as_much_work_as_a_long_one() -> None:
    tokenizer = Watched()
    texts = ["hello", ""] * 500
    assert await Encoder().encode_texts(tokenizer, texts) == [WordTokenizer().encode(text) for text in texts]
    assert threading.get_ident() not in tokenizer.threads


async def test_an_error_reaches_the_caller_and_the_thread_survives() -> None:
    encoder = Encoder(threads=1)

    def fail() -> Steps[int]:
        yield
        raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        await encoder.run(fail())
    with pytest.raises(RequestError, match="no"):
        at_once(fail())
    assert await encoder.encode_text(WordTokenizer(), "water " * 3_000) == WordTokenizer().encode("water " * 3_000)
    encoder.close()


async def test_cancelled_work_ends_after_its_current_turn() -> None:
    tokenizer = Watched()
    encoder = Encoder(threads=1)
    tokenizer.gate.clear()
    task = asyncio.create_task(encoder.encode_text(tokenizer, "hello water " * 200_000))
    await reached(tokenizer)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    tokenizer.gate.set()
    # The only thread is free long before it could have tokenized the whole cancelled text.
    made = await encoder.encode_text(tokenizer, "water " * 3_000)
    assert made == WordTokenizer().encode("water " * 3_000)
    assert tokenizer.running == 0


# What may happen to a session while one of its turns is tokenized.

TEXT = "the water flows " * 2_000


class Turn:
    """A turn that has started: its thread waits inside it."""

    def __init__(self, transcripts: Transcripts, tokenizer: Watched, prompt: ChatPrompt) -> None:
        self.transcripts, self.tokenizer, self.prompt = transcripts, tokenizer, prompt

    async def __aenter__(self) -> Turn:  # noqa: PYI034
        self.tokenizer.gate.clear()
        self.tokenizer.reached.clear()
        self._task = asyncio.create_task(self.transcripts.encode_chat("session", "model", self.tokenizer, self.prompt))
        await reached(self.tokenizer)
        # The calls in between are short and need no thread.
        return self

    async def __aexit__(self, *_: object) -> None:
        self.tokenizer.gate.set()
        self.encoded = await self._task
        assert self.encoded.token_ids == tuple(encode_chat(WordTokenizer(), self.prompt))
        self.transcripts.check_integrity()


async def begun() -> tuple[Transcripts, Watched]:
    transcripts, tokenizer = Transcripts(PLENTY), Watched()
    await transcripts.encode_chat("session", "model", tokenizer, chat("hello", "water", "and?"))
    return transcripts, tokenizer


async def test_a_session_forgotten_during_a_turn() -> None:
    transcripts, tokenizer = await begun()
    async with Turn(transcripts, tokenizer, chat("hello", "water", TEXT)) as turn:
        transcripts.forget("session")
        assert len(transcripts) == 0
    assert (len(transcripts), transcripts.bytes) == (0, 0)
    transcripts.record(turn.encoded, [300])
    assert transcripts.bytes == 0


async def test_a_session_forgotten_and_opened_again_during_a_turn() -> None:
    transcripts, tokenizer = await begun()
    async with Turn(transcripts, tokenizer, chat("hello", "water", TEXT)) as turn:
        transcripts.forget("session")
        drive(transcripts.encode_chat("session", "model", WordTokenizer(), chat("other")))
        size = transcripts.bytes
    assert (len(transcripts), transcripts.bytes) == (1, size)
    transcripts.record(turn.encoded, [300])
    assert transcripts.bytes == size
    transcripts.check_integrity()


async def test_the_same_turn_twice_at_once_keeps_the_answer() -> None:
    """The answer keeps its tokens: the late turn does not replace them."""
    transcripts, tokenizer = Transcripts(PLENTY), Watched()
    first = await transcripts.encode_chat("session", "model", tokenizer, chat("hello"))
    spelled = tuple(b" water")
    long = chat("hello", " water", TEXT)
    async with Turn(transcripts, tokenizer, long) as turn:
        transcripts.record(first, spelled)
        transcripts.check_integrity()
    again = await transcripts.encode_chat("session", "model", tokenizer, long)
    assert again.token_ids[: len(first.token_ids) + len(spelled)] == (*first.token_ids, *spelled)
    assert again.reused_tokens > turn.encoded.reused_tokens
    transcripts.check_integrity()


async def test_a_branch_removed_during_a_turn() -> None:
    transcripts, tokenizer = Transcripts(PLENTY), Watched()
    prompt = chat("hello", "water", TEXT)
    await transcripts.encode_chat("session", "model", tokenizer, chat("hello", "water", "and?"))
    async with Turn(transcripts, tokenizer, prompt):
        tokenizer.gate.set()
        for number in range(2 * MAX_BRANCHES):
            drive(transcripts.encode_chat("session", "model", tokenizer, chat(f"another {number}", "x", "y")))
            transcripts.check_integrity()
    assert (await transcripts.encode_chat("session", "model", tokenizer, prompt)).reused_tokens > 1_000
    transcripts.check_integrity()


async def test_a_session_evicted_during_a_turn() -> None:
    tokenizer = Watched()
    transcripts = Transcripts(20_000)
    await transcripts.encode_chat("session", "model", tokenizer, chat("hello", "water", "and?"))
    async with Turn(transcripts, tokenizer, chat("hello", "water", TEXT)):
        tokenizer.gate.set()
        for number in range(20):
            drive(transcripts.encode_chat(f"other {number}", "model", tokenizer, chat("x" * 500, "y")))
            transcripts.check_integrity()


async def test_a_new_session_that_is_too_large_is_never_kept() -> None:
    tokenizer = Watched()
    transcripts = Transcripts(0)
    async with Turn(transcripts, tokenizer, chat(TEXT)):
        transcripts.check_integrity()
    assert (len(transcripts), transcripts.bytes) == (0, 0)


@pytest.mark.parametrize("make", [smollm, WordTokenizer])
async def test_many_turns_at_once(make: Any) -> None:
    """Few sessions, some of them forgotten, and too little memory: the tokens are those from scratch."""
    tokenizer: Tokenizer = make()
    chooser = random.Random(5)
    transcripts = Transcripts(400_000)

    async def converse(number: int) -> None:
        contents: list[str] = [f"{number % 3} " + "the water flows " * chooser.choice([1, 400, 2_000])]
        for _ in range(4):
            prompt = chat(*contents)
            encoded = await transcripts.encode_chat(f"session {number % 3}", "model", tokenizer, prompt)
            assert encoded.token_ids == tuple(encode_chat(tokenizer, prompt))
            transcripts.check_integrity()
            if chooser.random() < 0.2:
                transcripts.forget(f"session {number % 3}")
            contents += ["It does. " * chooser.choice([1, 900]), "and?"]

    await asyncio.gather(*(converse(number) for number in range(9)))
    transcripts.check_integrity()


def test_a_thread_rests_longer_if_it_waited() -> None:
    assert rest_seconds(0.005, 0.005) == REST_SECONDS
    assert REST_SECONDS < rest_seconds(0.005, 0.004) < rest_seconds(0.005, 0.003) < MAX_REST_SECONDS
    assert rest_seconds(5.0, 0.005) == MAX_REST_SECONDS
    assert rest_seconds(0.005, 0.010) == REST_SECONDS, "the clock of CPU time is coarse, and may be ahead"
