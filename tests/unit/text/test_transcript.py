"""Tokenizing a turn with its session gives the tokens of tokenizing it from scratch, except for the model's own tokens."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import tracemalloc
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from front_end import Turns
from penstock.text.tokenizers.cuts import separators
from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, Tokenizer
from penstock.text.tokenizers.words import WordTokenizer
from penstock.text.transcript import MAX_BRANCHES, MAX_REMEMBERED_AT_ONCE, EncodedChat, Transcripts
from penstock.wire.errors import RequestError
from tokenizer_kinds import CHAT_ML, KINDS, byte_level, chat, encode_chat, say, smollm, tokenizer_of

PLENTY = 1 << 30
FAITHFUL = ("smollm", "llama3", "qwen", "prefixed", "llama2", "mistral", "gemma", "WordTokenizer")
"""The kinds whose templates and special tokens leave an answer unchanged."""

WORDS = "water flows größer 日本 😀 12 3 e\u0301 é im_end assistant user ▁ _ \ufffd \u200b ."
MARKS = "<|im_start|> <|im_end|> <|eot_id|> <|start_header_id|> <s> </s> [INST] [/INST] <think> <unk> <0x41> <| |> < > <<"
FRAGMENTS = [*WORDS.split(" "), *MARKS.split(" ")]
TEXTS = st.lists(st.sampled_from([*FRAGMENTS, " ", " ", "  ", "\n", "\n\n", "\t", "\u00a0"]), max_size=8).map("".join)
ROLES = st.sampled_from(["user", "user", "assistant", "tool"])
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "WordTokenizer"])
@given(text=TEXTS)
@example(text="<<|eot_id|>")
@example(text="12 \n<|im_start|>")
@example(text="water<|im_start|>water")
@example(text=" water  <|im_end|> <|im_start|> <think>")
def test_parts_are_tokenized_as_the_whole_is(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    for whole in (text, tokenizer.render_chat(chat(text))):
        parts = tokenizer.parts(whole)
        assert parts
        assert "".join(parts) == whole
        assert list(chain.from_iterable(map(tokenizer.encode_part, parts))) == tokenizer.encode_part(whole)
        check_edges(tokenizer, whole)


def check_edges(tokenizer: Tokenizer, whole: str) -> None:
    parts = tokenizer.parts(whole)
    edges = {sum(map(len, parts[:count])) for count in range(1, len(parts))}
    assert edges == {position for position in range(1, len(whole) + 1) if tokenizer.begins_part(whole, position)}


@given(text=TEXTS)
def test_a_chat_in_words_is_cut_at_its_marks(text: str) -> None:
    tokenizer = WordTokenizer()
    end, message, role = range(tokenizer.end_id, tokenizer.vocab_size)
    asked = [role, *tokenizer.encode("user"), message, *tokenizer.encode(text), end]
    rendered = tokenizer.render_chat(chat(text))
    assert encode_chat(tokenizer, chat(text)) == [*asked, role, *tokenizer.encode("assistant"), message]
    assert len(tokenizer.parts(rendered)) == 5
    check_edges(tokenizer, rendered)


@given(first=TEXTS, second=TEXTS, third=TEXTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "WordTokenizer"])
def test_text_before_a_separator_does_not_change_the_tokens_after_it(kind: str, first: str, second: str, third: str) -> None:
    tokenizer = tokenizer_of(kind)
    for mark in ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<s>", "</s>", "[INST]"):
        if tokenizer.begins_part(mark, 0):
            after = tokenizer.encode_part(mark + third)
            assert tokenizer.encode_part(first + mark + third) == tokenizer.encode_part(first) + after
            assert tokenizer.encode_part(second + mark + third) == tokenizer.encode_part(second) + after


def test_only_tokens_that_are_always_found_are_separators() -> None:
    added = [
        AddedToken("<good>", special=True, normalized=False),
        AddedToken("<text>", special=False, normalized=False),
        AddedToken("<seen>", special=True, normalized=True),
        AddedToken("<left>", special=True, normalized=False, lstrip=True),
        AddedToken("<word>", special=True, normalized=False, single_word=True),
        AddedToken("<right>", special=True, normalized=False, rstrip=True),
        AddedToken("<in>", special=True, normalized=False),
        AddedToken("+<in>-", special=True, normalized=False),
        AddedToken("=>", special=True, normalized=False),
        AddedToken(">x", special=True, normalized=False),
        AddedToken("(long)", special=True, normalized=False),
        AddedToken("(long)er", special=True, normalized=False),
        AddedToken(" space", special=True, normalized=False),
        AddedToken("letter", special=True, normalized=False),
    ]
    assert separators(added) == ("<good>", "<right>", "+<in>-", "=>", "(long)er")


# Answers, and the tokens that the model may have generated for them.


@functools.cache
def single_bytes(tokenizer: Any) -> dict[int, int]:
    pieces = ((index, tokenizer.token_bytes(index)) for index in tokenizer.ordinary_ids)
    found = {piece[0]: index for index, piece in pieces if len(piece) == 1}
    return found | ({byte: byte for byte in range(256)} if isinstance(tokenizer, WordTokenizer) else {})


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text byte by byte, as no tokenizer would write it. Bytes without a token are left out."""
    letters = single_bytes(cast(Hashable, tokenizer))
    return [letters[byte] for byte in text.encode() if byte in letters]


def as_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text that the client gets."""
    detokenizer = tokenizer.detokenizer()
    return detokenizer.feed(token_ids) + detokenizer.finish()


def draw_answer(draw: Any, tokenizer: Tokenizer) -> list[int]:
    text = draw(TEXTS)
    match draw(st.sampled_from(["canonical", "spelled", "spelled", "cut", "random"])):
        case "canonical":
            token_ids = tokenizer.encode_part(text)
        case "spelled":
            token_ids = spelled(tokenizer, text)
        case "cut":
            token_ids = spelled(tokenizer, text + "😀")[:-1]
        case _:
            token_ids = draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
    return [*token_ids, tokenizer.end_id] if draw(st.booleans()) else token_ids


class Checked:
    """The transcripts of one session. Every result is compared with tokenizing from scratch."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = PLENTY) -> None:
        self.tokenizer = tokenizer
        self.transcripts = Transcripts(max_bytes)
        self.own: dict[str, set[tuple[int, ...]]] = {}
        """The tokens that the model itself made of a part."""

    def encode(self, messages: Sequence[ChatMessage], key: str | None = "session") -> EncodedChat:
        encoded = asyncio.run(self.transcripts.encode_chat(key, "model", self.tokenizer, ChatPrompt(messages)))
        full = encode_chat(self.tokenizer, ChatPrompt(messages))
        assert self.tokenizer.decode(encoded.token_ids) == self.tokenizer.decode(full)
        assert encoded.token_ids == tuple(full) or self._has_own_tokens(messages, encoded.token_ids)
        assert 0 <= encoded.reused_tokens <= len(encoded.token_ids)
        assert encoded.ending == self.tokenizer.render_chat(ChatPrompt(messages))[-256:]
        self.transcripts.check_integrity()
        return encoded

    def record(self, messages: Sequence[ChatMessage], prompt: EncodedChat, token_ids: Sequence[int]) -> str:
        last = self.tokenizer.parts(self.tokenizer.render_chat(ChatPrompt(messages)))[-1]
        self.transcripts.record(prompt, token_ids)
        self.transcripts.check_integrity()
        answer = self.tokenizer.read_answer(last, token_ids)
        if answer is not None:
            own = (*self.tokenizer.encode_part(last), *answer.token_ids)
            self.own.setdefault(last + answer.text, set()).add(own)
        return as_text(self.tokenizer, token_ids)

    def _has_own_tokens(self, messages: Sequence[ChatMessage], token_ids: tuple[int, ...]) -> bool:
        """Whether each part has its tokens, or those that the model generated for this very text."""
        reached = {0}
        for part in self.tokenizer.parts(self.tokenizer.render_chat(ChatPrompt(messages))):
            choices = {tuple(self.tokenizer.encode_part(part)), *self.own.get(part, ())}
            reached = {at + len(choice) for at in reached for choice in choices if token_ids[at : at + len(choice)] == choice}
        return len(token_ids) in reached


def draw_history(draw: Any, messages: list[ChatMessage], earlier: list[list[ChatMessage]]) -> list[ChatMessage]:
    """Changes to a conversation that a client may make before its next turn."""
    changed = list(messages)
    place = draw(st.integers(0, max(0, len(changed) - 1)))
    match draw(st.sampled_from(["continue", "continue", "continue", "edit", "delete", "system", "branch", "again", "spaces"])):
        case "edit" if changed:
            changed[place] = ChatMessage(role=changed[place]["role"], content=draw(TEXTS))
        case "spaces" if changed:
            content = changed[place]["content"]
            changed[place] = ChatMessage(
                role=changed[place]["role"], content=draw(st.sampled_from([f" {content}", f"{content}\n", content[1:]]))
            )
        case "delete" if changed:
            del changed[place]
        case "system":
            changed = [ChatMessage(role="system", content=draw(TEXTS)), *(m for m in changed if m["role"] != "system")]
        case "branch" if earlier:
            changed = list(draw(st.sampled_from(earlier)))
        case "again":
            return changed or [ChatMessage(role="user", content="")]
    return [*changed, ChatMessage(role=draw(ROLES), content=draw(TEXTS))]


@EVERY_KIND
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_conversation_is_tokenized_as_from_scratch(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    checked = Checked(tokenizer, data.draw(st.sampled_from([PLENTY, PLENTY, 12_000, 3_000, 0])))
    messages: list[ChatMessage] = []
    earlier: list[list[ChatMessage]] = []
    for _ in range(data.draw(st.integers(1, 7))):
        messages = draw_history(data.draw, messages, earlier)
        key = data.draw(st.sampled_from(["session", "session", "session", "other", None]))
        asked = messages
        prompt = checked.encode(asked, key)
        earlier.append(asked)
        for _ in range(data.draw(st.integers(0, 2))):
            text = checked.record(asked, prompt, draw_answer(data.draw, tokenizer))
            # After a stop string, the client has less text than was generated.
            sent = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) and text else text
            messages = [*earlier[-1], ChatMessage(role="assistant", content=sent)]
            earlier.append(messages)


@pytest.mark.parametrize("kind", FAITHFUL)
@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_keeps_the_tokens_that_the_model_generated(kind: str, ended: bool) -> None:
    tokenizer = tokenizer_of(kind)
    checked = Checked(tokenizer)
    contents = ["the water"]
    for turn, text in enumerate(["The water.", "größer als 100 € water", "日本語 😀 water", "a\n\nb water", "The water."]):
        prompt = checked.encode(say(*contents))
        # If every part gets a space before it, an answer at the start of a part gets one, too.
        space = " " if kind == "mistral" else ""
        generated = spelled(tokenizer, space + text)
        sent = checked.record(say(*contents), prompt, [*generated, tokenizer.end_id] if ended else generated)
        assert sent == text
        contents += [sent, f"and {turn}?"]
        following = checked.encode(say(*contents))
        assert following.token_ids[: len(prompt.token_ids) + len(generated)] == (*prompt.token_ids, *generated)
        assert following.token_ids != tuple(encode_chat(tokenizer, chat(*contents)))
        assert following.reused_tokens == len(prompt.token_ids) + len(generated)


@pytest.mark.parametrize("kind", FAITHFUL)
def test_each_of_two_answers_to_one_prompt_keeps_its_tokens(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    checked = Checked(tokenizer)
    asked = [ChatMessage(role="user", content="")] * 4
    prompt = checked.encode(asked)
    space = " " if kind == "mistral" else ""
    generated = [spelled(tokenizer, space + text) for text in ("", "water")]
    sent = [checked.record(asked, prompt, token_ids) for token_ids in generated]
    assert sent == ["", "water"]
    following = checked.encode([*asked, ChatMessage(role="assistant", content="water"), ChatMessage(role="user", content="")])
    assert following.token_ids[len(prompt.token_ids) :][: len(generated[1])] == tuple(generated[1])


@pytest.mark.parametrize("kind", FAITHFUL)
def test_canonical_answers_give_the_very_tokens_of_the_tokenizer(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    checked = Checked(tokenizer)
    contents = ["the water"]
    for turn in range(5):
        prompt = checked.encode(say(*contents))
        whole = encode_chat(tokenizer, chat(*contents, f"It flows {turn} times.", ""))
        generated = whole[len(prompt.token_ids) :]
        cut = generated.index(tokenizer.end_id)
        contents += [checked.record(say(*contents), prompt, generated[: cut + 1]), "and then?"]
        following = checked.encode(say(*contents))
        assert following.token_ids == tuple(encode_chat(tokenizer, chat(*contents)))
        assert following.reused_tokens >= len(prompt.token_ids) + cut


@EVERY_KIND
def test_a_special_token_spelled_out_by_the_model_stays_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for text in ("so <|im_end|>", "<|eot_id|>", "a</s>b", "<|im_end", "|>", "<s>"):
        checked = Checked(tokenizer)
        prompt = checked.encode(say("water"))
        sent = checked.record(say("water"), prompt, [*spelled(tokenizer, text), tokenizer.end_id])
        checked.encode(say("water", sent, "and?"))
        checked.encode(say("water", sent + "<|im_end|>", "and?"))


@pytest.mark.parametrize("kind", FAITHFUL)
def test_incomplete_characters_are_tokenized_again(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    checked = Checked(tokenizer)
    prompt = checked.encode(say("water"))
    sent = checked.record(say("water"), prompt, spelled(tokenizer, "a😀")[:-1])
    assert sent.endswith("\N{REPLACEMENT CHARACTER}")
    following = checked.encode(say("water", sent, "and?"))
    assert following.token_ids == tuple(encode_chat(tokenizer, chat("water", sent, "and?")))


def test_text_that_is_not_normalized_is_tokenized_again() -> None:
    """The tokenizer would normalize it."""
    tokenizer = tokenizer_of("qwen")
    checked = Checked(tokenizer)
    prompt = checked.encode(say("water"))
    sent = checked.record(say("water"), prompt, spelled(tokenizer, "cafe\u0301"))
    assert checked.encode(say("water", sent, "and?")).token_ids == tuple(encode_chat(tokenizer, chat("water", sent, "and?")))


def test_text_that_the_vocabulary_lacks_is_tokenized_again() -> None:
    """The model can generate this token, but no text becomes it."""
    described = json.loads(byte_level(["<|im_start|>", "<|im_end|>"]).to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary["aĄ"] = vocabulary.pop("Ą")
    checked = Checked(ModelTokenizer(Library.from_str(json.dumps(described)), {"eos_token": "<|im_end|>"}, CHAT_ML))
    prompt = checked.encode(say("water"))
    sent = checked.record(say("water"), prompt, [vocabulary["aĄ"]])
    assert sent == "a\x04"
    checked.encode(say("water", sent, "and?"))


@pytest.mark.parametrize("kind", ["phi", "prefixed"])
def test_spaces_that_a_special_token_strips_or_adds(kind: str) -> None:
    definition = tokenizer_of(kind).definition
    assert definition is not None
    bare = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    for text in ("water", " water", "  water"):
        checked = Checked(ModelTokenizer(Library.from_str(definition), {"eos_token": "<|im_end|>"}, bare))
        prompt = checked.encode(say("water"))
        sent = checked.record(say("water"), prompt, spelled(checked.tokenizer, text))
        for content in (sent, sent.strip()):
            checked.encode(say("water", content, "and?"))


def test_tokens_that_only_the_library_can_decode_are_not_kept() -> None:
    tokenizer = tokenizer_of("stepwise")
    assert tokenizer.read_answer("<|im_start|>assistant\n", tokenizer.encode_part("water")) is None


def test_an_answer_that_the_client_changed_is_tokenized_again() -> None:
    tokenizer = smollm()
    checked = Checked(tokenizer)
    prompt = checked.encode(say("water"))
    generated = spelled(tokenizer, "It flows.")
    checked.record(say("water"), prompt, generated)
    for content in ("It flows", "It flows. ", " It flows.", "It flows.<|im_end|>", ""):
        following = checked.encode(say("water", content, "and?"))
        expected = tuple(encode_chat(tokenizer, chat("water", content, "and?")))
        assert (following.token_ids == expected) == (content != "It flows.<|im_end|>")
    assert checked.encode(say("water", "It flows.", "and?")).token_ids[len(prompt.token_ids) :][: len(generated)] == tuple(generated)


def test_every_branch_is_known_and_stored_once() -> None:
    checked = Checked(smollm())
    long = "the water flows " * 2_000
    prompt = checked.encode(say(long))
    size = checked.transcripts.bytes
    texts = [checked.record(say(long), prompt, spelled(checked.tokenizer, text)) for text in ("one", "two", "three")]
    for text in texts:
        checked.encode(say(long, text, "and?"))
    assert checked.transcripts.bytes < size + len(long)
    for text in texts:
        again = checked.encode(say(long, text, "and?"))
        assert again.reused_tokens > len(again.token_ids) - 8
        assert again.token_ids[len(prompt.token_ids) :][: len(text)] == tuple(spelled(checked.tokenizer, text))


def test_the_latest_branches_are_kept() -> None:
    checked = Checked(smollm())
    for count in range(3 * MAX_BRANCHES):
        checked.encode(say("the same", "each time", f"but for {count}", "this", "and?"))
    last = 3 * MAX_BRANCHES - 1
    reused = [checked.encode(say("the same", "each time", f"but for {count}", "this", "and?")).reused_tokens for count in (last, 0)]
    assert reused[0] > reused[1] > 0


async def test_a_chat_that_is_only_counted_leaves_the_session_as_it_is() -> None:
    transcripts, tokenizer = Transcripts(PLENTY), smollm()
    said = chat("water", "flows", "and?")

    async def count(prompt: ChatPrompt) -> EncodedChat:
        return await transcripts.encode_chat("session", "model", tokenizer, prompt, is_remembered=False)

    assert (await count(said)).reused_tokens == len(transcripts) == 0
    first = await transcripts.encode_chat("session", "model", tokenizer, said)
    size = transcripts.bytes
    for number in range(3 * MAX_BRANCHES):
        await count(chat(f"another {number}", "this", "and?"))
    assert transcripts.bytes == size
    counted = await count(said)
    assert counted.token_ids == first.token_ids
    assert counted.turn is None
    assert counted.reused_tokens > len(counted.token_ids) - 8
    transcripts.check_integrity()


def test_an_edit_keeps_what_stands_before_it() -> None:
    checked = Checked(smollm())
    contents = [f"message {count} of many" for count in range(9)]
    whole = checked.encode(say(*contents))
    edited = checked.encode(say(*contents[:6], "another", *contents[7:]))
    assert len(encode_chat(checked.tokenizer, chat(*contents[:6]))) - 8 < edited.reused_tokens < len(whole.token_ids) - 8
    system = checked.encode([ChatMessage(role="system", content="Be brief."), *say(*contents)])
    assert system.reused_tokens == 0


async def test_another_model_or_tokenizer_starts_a_new_transcript() -> None:
    transcripts = Transcripts(PLENTY)
    words, others = WordTokenizer(), WordTokenizer()
    first = await transcripts.encode_chat("session", "model", words, chat("water", "flows", "and?"))
    assert (await transcripts.encode_chat("session", "model", words, chat("water", "flows", "and?"))).reused_tokens > 0
    assert (await transcripts.encode_chat("session", "model", others, chat("water", "flows", "and?"))).reused_tokens == 0
    assert (await transcripts.encode_chat("session", "another", others, chat("water", "flows", "and?"))).reused_tokens == 0
    size = transcripts.bytes
    transcripts.record(first, [1, 2, 3])
    assert (transcripts.bytes, len(transcripts)) == (size, 1)
    transcripts.check_integrity()


def test_without_a_key_nothing_is_remembered() -> None:
    checked = Checked(WordTokenizer())
    prompt = checked.encode(say("water", "flows", "and?"), None)
    checked.record(say("water", "flows", "and?"), prompt, [300])
    assert (checked.transcripts.bytes, len(checked.transcripts)) == (0, 0)
    assert checked.encode(say("water", "flows", "and?"), None).reused_tokens == 0


def test_what_is_forgotten_is_gone() -> None:
    checked = Checked(WordTokenizer())
    prompt = checked.encode(say("water", "flows", "and?"))
    checked.transcripts.forget("session")
    checked.transcripts.forget("session")
    checked.record(say("water", "flows", "and?"), prompt, [300])
    assert (checked.transcripts.bytes, len(checked.transcripts)) == (0, 0)
    checked.encode(say("water", "flows", "and?"))
    checked.record(say("water", "flows", "and?"), prompt, [300])
    assert checked.encode(say("water", "flows", "and?", " about", "x")).reused_tokens < len(prompt.token_ids)


def test_counters() -> None:
    checked = Checked(WordTokenizer())
    encoded = [checked.encode(say("water", "flows", "and?"), key) for key in ("one", "one", None)]
    transcripts = checked.transcripts
    assert transcripts.tokens_reused == sum(prompt.reused_tokens for prompt in encoded) > 0
    assert transcripts.tokens_reused + transcripts.tokens_encoded == sum(len(prompt.token_ids) for prompt in encoded)


def test_the_least_recently_used_sessions_make_room() -> None:
    checked = Checked(WordTokenizer(), 200_000)
    for count in range(60):
        checked.encode(say("x" * 5_000, "flows", "and?"), f"session {count}")
        checked.encode(say("x" * 5_000, "flows", "and?"), "the same")
    assert 2 < len(checked.transcripts) < 10
    assert checked.encode(say("x" * 5_000, "flows", "and?"), "the same").reused_tokens > 5_000
    assert checked.encode(say("x" * 5_000, "flows", "and?"), "session 59").reused_tokens > 5_000
    assert checked.encode(say("x" * 5_000, "flows", "and?"), "session 1").reused_tokens == 0
    prompt = checked.encode(say("x" * 500_000), "too large")
    checked.record(say("x" * 500_000), prompt, [300])
    assert checked.transcripts.bytes <= 200_000


async def test_sessions_of_one_tenant_make_room_for_its_own() -> None:
    tokenizer, transcripts = WordTokenizer(), Transcripts(200_000)
    prompt = chat("x" * 5_000, "flows", "and?")
    await transcripts.encode_chat("of another", "model", tokenizer, prompt, "b")
    for count in range(60):
        await transcripts.encode_chat(f"session {count}", "model", tokenizer, prompt, "a")
        transcripts.check_integrity()
    assert (await transcripts.encode_chat("of another", "model", tokenizer, prompt, "b")).reused_tokens > 5_000
    assert (await transcripts.encode_chat("session 1", "model", tokenizer, prompt, "a")).reused_tokens == 0


@pytest.mark.parametrize("content", ["x", "water and more ", "größer 日本 😀 "])
async def test_memory_is_not_underestimated(content: str) -> None:
    tokenizer = smollm()
    spelled(tokenizer, content)
    transcripts = Transcripts(PLENTY)
    gc.collect()
    tracemalloc.start()
    try:
        for session in range(5):
            for length in (1, 40):
                for turn in range(6):
                    prompt = chat(*[content * length, f"{turn}"] * turn, "and?")
                    encoded = await transcripts.encode_chat(f"key {session}", "model", tokenizer, prompt)
                    transcripts.record(encoded, spelled(tokenizer, content * length))
        del encoded, prompt
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
        assert taken <= transcripts.bytes <= 4 * taken
        gc.disable()
        for session in range(5):
            transcripts.forget(f"key {session}")
        # All memory is freed without the garbage collector.
        left, _ = tracemalloc.get_traced_memory()
        assert (transcripts.bytes, left < taken / 10) == (0, True)
    finally:
        gc.enable()
        tracemalloc.stop()


async def test_a_chat_that_the_template_refuses_is_refused() -> None:
    tokenizer = ModelTokenizer(byte_level(["</s>"]), {"eos_token": "</s>"}, "{{ raise_exception('no') }}")
    transcripts = Transcripts(PLENTY)
    for key in ("session", None):
        with pytest.raises(RequestError, match="refuses these messages: no"):
            await transcripts.encode_chat(key, "model", tokenizer, chat("water"))
    assert transcripts.bytes == 0


async def test_thousands_of_messages_are_remembered_in_pieces() -> None:
    words, transcripts = WordTokenizer(), Transcripts(PLENTY)
    messages = [ChatMessage(role="user", content=f"{number}") for number in range(4000)]
    async with Turns() as turns:
        first = await transcripts.encode_chat("s", "m", words, ChatPrompt(messages))
        assert turns.count >= len(messages) // MAX_REMEMBERED_AT_ONCE
    transcripts.check_integrity()
    again = await transcripts.encode_chat("s", "m", words, ChatPrompt([*messages, ChatMessage(role="user", content="more")]))
    assert again.reused_tokens >= len(first.token_ids) - 20
    assert again.token_ids[: again.reused_tokens] == first.token_ids[: again.reused_tokens]
    transcripts.check_integrity()


async def test_a_session_that_ends_while_it_is_remembered_stays_forgotten() -> None:
    words, transcripts = WordTokenizer(), Transcripts(PLENTY)
    messages = [ChatMessage(role="user", content=f"{number}") for number in range(4000)]
    encoding = asyncio.create_task(transcripts.encode_chat("s", "m", words, ChatPrompt(messages)))
    while not transcripts.bytes > 100_000:
        await asyncio.sleep(0)
    transcripts.forget("s")
    encoded = await encoding
    assert encoded.turn is None
    assert (transcripts.bytes, len(transcripts)) == (0, 0)
    transcripts.record(encoded, [65])
    transcripts.check_integrity()


async def test_parts_in_a_memo_are_not_tokenized_again() -> None:
    words, transcripts = WordTokenizer(), Transcripts(PLENTY)
    memo: dict[str, bytes] = {}
    messages = [ChatMessage(role="user", content=f"{number} " + "word " * 50) for number in range(200)]
    await transcripts.encode_chat(None, "m", words, ChatPrompt(messages), memo=memo)
    encoded = transcripts.tokens_encoded
    fewer = await transcripts.encode_chat(None, "m", words, ChatPrompt(messages[50:]), memo=memo)
    assert transcripts.tokens_encoded == encoded
    assert fewer.token_ids == (await transcripts.encode_chat(None, "m", words, ChatPrompt(messages[50:]))).token_ids
