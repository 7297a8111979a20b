"""Images in chats: each becomes the tokens that transformers' processors give it, and no text does."""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec import structs
from tokenizers import Tokenizer as Library

from chat_templates import PUBLISHED
from penstock.media.families import simulator
from penstock.media.families.make import layout, read_rules
from penstock.text.images import BREAK, IMAGE_MARK, MARK_CHARACTERS, image_mark, marked_name, named_mark
from penstock.text.marks import Place
from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, Tokenizer
from penstock.text.tokenizers.words import WordTokenizer
from penstock.text.transcript import EncodedChat, Transcripts
from penstock.wire.errors import MessageError, RequestError
from penstock.wire.images import IMAGE_NAME_BYTES, ImageLayout, image_ids, is_image_id, wrong_images
from tiny_vision import IMAGE_TOKEN_ID, KINDS, PLACEHOLDERS, Kind, make_picture, positions_per_tile, processor, tokenizer, vision_model

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
SIZES = ((70, 40), (33, 200), (128, 128), (5, 3), (300, 90))
NAMED_TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
Parts = Sequence[str | int]
"""What a message says: texts, and images by their number."""


def test_marks_are_found_and_have_one_length() -> None:
    names = [os.urandom(IMAGE_NAME_BYTES) for _ in range(3)]
    marks = [image_mark(0), image_mark(12), *map(named_mark, names)]
    assert {len(mark) for mark in marks} == {MARK_CHARACTERS}
    assert [found.group() for found in IMAGE_MARK.finditer("a".join(marks))] == marks
    assert [marked_name(mark) for mark in marks[2:]] == names


def name_of(number: int) -> bytes:
    return number.to_bytes(IMAGE_NAME_BYTES, "big")


@functools.cache
def layouts(kind: Kind) -> Mapping[bytes, ImageLayout]:
    rules = read_rules(vision_model(kind))
    assert rules is not None
    assert rules.placeholder == PLACEHOLDERS[kind]
    return {name_of(number): layout(rules, name_of(number), size) for number, size in enumerate(SIZES)}


@functools.cache
def house_tokenizer(kind: Kind) -> Tokenizer:
    return pack_tokenizer(vision_model(kind)).load()


def prompt_of(kind: Kind, *messages: tuple[str, Parts], **more: Any) -> ChatPrompt:
    return ChatPrompt([message_of(*message) for message in messages], images=layouts(kind), image_placeholder=PLACEHOLDERS[kind], **more)


def message_of(role: str, parts: Parts) -> ChatMessage:
    return ChatMessage(role=role, content="".join([each if isinstance(each, str) else named_mark(name_of(each)) for each in parts]))


def encode(used: Tokenizer, prompt: ChatPrompt, transcripts: Transcripts | None = None, **more: Any) -> EncodedChat:
    made = Transcripts(1 << 20) if transcripts is None else transcripts
    encoded = asyncio.run(made.encode_chat(more.pop("key", None), "model", used, prompt, **more))
    assert wrong_images(encoded.token_ids, encoded.images) is None
    made.check_integrity()
    return encoded


def as_transformers(token_ids: Sequence[int]) -> list[int]:
    return [IMAGE_TOKEN_ID if is_image_id(each) else each for each in token_ids]


@functools.cache
def whole_processor(kind: Kind) -> Any:
    from transformers import Idefics3Processor, Qwen3VLProcessor

    directory = vision_model(kind)
    words = tokenizer(directory)
    if kind == "idefics3":
        return Idefics3Processor(processor(directory), words, positions_per_tile(directory), chat_template=words.chat_template)

    class WithoutVideos(Qwen3VLProcessor):
        """Its part for videos needs torchvision."""

        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    made: Any = WithoutVideos
    return made(image_processor=processor(directory), tokenizer=words, chat_template=words.chat_template)


def transformers_ids(kind: Kind, *messages: tuple[str, Parts]) -> list[int]:
    def part_of(each: str | int) -> dict[str, Any]:
        return {"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": make_picture(each, *SIZES[each])}

    chat = [{"role": role, "content": [part_of(each) for each in parts]} for role, parts in messages]
    made = whole_processor(kind).apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True)
    ids: list[int] = made["input_ids"][0]
    return ids


CHATS: dict[str, list[tuple[str, Parts]]] = {
    "one": [("user", [0, "What is this?"])],
    "behind the text": [("user", ["Look at this: ", 1])],
    "two with text between": [("system", ["Be brief."]), ("user", ["From ", 0, " to\n\n", 2, "\n"])],
    "five, some equal": [("user", [0, 1, 2, 0, 3, " all of them"])],
    "two turns": [("user", ["Here", 4, "is one."]), ("assistant", ["I see."]), ("user", ["And", 3])],
}


@EVERY_KIND
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_a_chat_has_the_tokens_of_transformers(kind: Kind, chat: list[tuple[str, Parts]]) -> None:
    encoded = encode(house_tokenizer(kind), prompt_of(kind, *chat))
    assert as_transformers(encoded.token_ids) == transformers_ids(kind, *chat)
    shown = [each for _, parts in chat for each in parts if isinstance(each, int)]
    assert [span.name for span in encoded.images] == [name_of(each) for each in shown]
    for span in encoded.images:
        made = layouts(kind)[span.name]
        ids = [each for each in encoded.token_ids[span.start : span.end] if is_image_id(each)]
        assert tuple(ids) == image_ids(span.name, made.positions)
        assert (span.grid, span.size) == (made.grid, made.size)


@EVERY_KIND
@pytest.mark.parametrize(
    "parts", [["PLACEHOLDER"], ["PLACEHOLDER", 0, "x PLACEHOLDERPLACEHOLDER"], ["PLACE", 1, "HOLDER"], ["<|image_pad|> <image>"]]
)
def test_a_placeholder_in_a_text_stays_text(kind: Kind, parts: Parts) -> None:
    parts = [each.replace("PLACEHOLDER", PLACEHOLDERS[kind]) if isinstance(each, str) else each for each in parts]
    shown = [each for each in parts if isinstance(each, int)]
    named = {"name": PLACEHOLDERS[kind], "parameters": {"properties": {PLACEHOLDERS[kind]: {}}}}
    prompt = prompt_of(kind, ("user", parts), tools=[{"type": "function", "function": named}] if 0 in shown else ())
    if not shown:
        prompt = ChatPrompt(prompt.messages, image_placeholder=PLACEHOLDERS[kind])
    used = house_tokenizer(kind)
    for key in (None, "session"):
        encoded = encode(used, prompt, key=key)
        assert IMAGE_TOKEN_ID not in encoded.token_ids
        assert [span.name for span in encoded.images] == [name_of(each) for each in shown]
        outside = [each for each in encoded.token_ids if not is_image_id(each)]
        text = b"".join([used.token_bytes(each) for each in outside]).decode()
        said = [each for each in parts if isinstance(each, str)]
        assert all(each in text for each in said)
        assert BREAK not in text


def make_tokenizer(kind: Kind, template: str) -> ModelTokenizer:
    definition = (vision_model(kind) / "tokenizer.json").read_text()
    return ModelTokenizer(Library.from_str(definition), {"eos_token": "<|im_end|>"}, template)


def test_a_template_that_knows_only_parts() -> None:
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    used = make_tokenizer("idefics3", DEFAULT_CHAT_TEMPLATE)
    assert not [loss for loss in used.template_losses if "user and assistant" in loss]
    prompt = prompt_of("idefics3", ("user", [0, "What?"]), ("assistant", ["That."]), ("user", ["And ", 1]))
    marks = [named_mark(name_of(number)) for number in range(2)]
    start = "<|im_start|>User:{}What?<end_of_utterance>\nAssistant: That.<end_of_utterance>\nUser: And {}<end_of_utterance>\nAssistant:"
    assert used.render_chat(prompt) == start.format(*marks)
    assert used.render_chat(ChatPrompt([message_of("user", ["Hi"])])) == "<|im_start|>User: Hi<end_of_utterance>\nAssistant:"


PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
THREE_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content[:3] %}{{ p.text or '<image>' }}{% endfor %}{% endif %}{% endfor %}"
)
USERS_ONLY = (
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'user' and m.content is not string %}"
    "{% for p in m.content %}{{ p.text or '<image>' }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [PLAIN, USERS_ONLY])
def test_a_template_that_takes_texts_keeps_marks_as_texts(template: str) -> None:
    used = make_tokenizer("idefics3", template)
    rendered = used.render_chat(prompt_of("idefics3", ("user", ["a", 0, "b"]), ("assistant", ["c", 1]), ("user", [2])))
    assert rendered.replace("\n", "") == "[user] a{}b[assistant] c{}[user] {}".format(*[named_mark(name_of(each)) for each in range(3)])


def test_a_message_whose_image_is_left_out_is_named() -> None:
    used = make_tokenizer("idefics3", THREE_PARTS)
    assert used.render_chat(prompt_of("idefics3", ("user", [0, "b"]))) == named_mark(name_of(0)) + "b"
    with pytest.raises(MessageError, match="leaves out or repeats an image of this user message") as caught:
        used.render_chat(prompt_of("idefics3", ("user", ["a", 0]), ("assistant", ["b"]), ("user", ["a", 0, "<image>", 1])))
    assert caught.value.place == 2


def test_a_template_that_repeats_a_message_is_refused() -> None:
    used = make_tokenizer("idefics3", PLAIN + "{{ messages[-1].content }}")
    with pytest.raises(MessageError, match="leaves out or repeats an image"):
        used.render_chat(prompt_of("idefics3", ("user", ["a", 0])))


SYSTEM_LAST = (
    "{% for m in messages if m.role != 'system' %}"
    + USERS_ONLY.partition("%}")[2].replace("m.role == 'user' and ", "")
    + USERS_ONLY.replace("in messages", "in messages if m.role == 'system'").replace("m.role == 'user' and ", "")
)


def test_a_template_that_moves_messages_does_not_mix_images_up() -> None:
    used = make_tokenizer("idefics3", SYSTEM_LAST)
    rendered = used.render_chat(prompt_of("idefics3", ("system", ["a"]), ("user", [1, "b", 2])))
    assert rendered == "[user] {}b{}[system] a".format(*[named_mark(name_of(each)) for each in (1, 2)])
    with pytest.raises(RequestError, match="changes the order of images"):
        used.render_chat(prompt_of("idefics3", ("system", ["a", 0]), ("user", [1, "b"])))


def test_tool_results_with_images_reach_the_prompt() -> None:
    call = {"id": "call_one", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    for kind in KINDS:
        asked, shown = message_of("user", ["Look."]), message_of("tool", ["Seen: ", 1])
        called = ChatMessage(role="assistant", content="", tool_calls=[call])  # type: ignore[list-item]
        chat = [asked, called, ChatMessage({**shown, "tool_call_id": "call_one"})]
        prompt = ChatPrompt(chat, images=layouts(kind), image_placeholder=PLACEHOLDERS[kind])
        assert [span.name for span in encode(house_tokenizer(kind), prompt).images] == [name_of(1)]


def rendered_by_jinja(template: str, messages: Sequence[dict[str, Any]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template([list(messages)], chat_template=template, add_generation_prompt=True, **NAMED_TOKENS)
    return str(rendered[0][0])


def find_placeholder(template: str) -> str | None:
    """What a template writes for each image more. None: it shows no images."""
    first, image, second = {"type": "text", "text": "First."}, {"type": "image"}, {"type": "text", "text": "Second."}
    written = []
    for parts in ([first, image, second], [first, image, image, second]):
        try:
            rendered = rendered_by_jinja(template, [{"role": "user", "content": parts}])
        except Exception:  # noqa: BLE001, a template for text raises anything
            return None
        written.append(rendered.partition("First.")[2].partition("Second.")[0])
    once, twice = written
    size = len(twice) - len(once)
    ways = [once[start : start + size] for start in range(len(once)) if once[: start + size] + once[start:] == twice]
    return ways[0] if size and ways and "type" not in ways[0] else None


def test_published_templates_with_images_render_as_in_jinja() -> None:
    from penstock.text.template import ChatTemplates

    if not PUBLISHED.exists():
        pytest.skip(f"no published templates: {PUBLISHED} does not exist")
    shown, marks = [], [named_mark(name_of(number)) for number in range(3)]
    roles = ("user", "assistant", "user")
    image: dict[str, str] = {"type": "image"}
    chat: list[Any] = [[{"type": "text", "text": "Look: "}, image], "Answer.", [image, {"type": "text", "text": "and"}, image]]
    contents = [f"Look: {marks[0]}", "Answer.", f"{marks[1]}and{marks[2]}"]
    images = {name_of(number): layout(simulator.make_rules(), name_of(number), (1, 1)) for number in range(3)}
    messages = [ChatMessage(role=role, content=said) for role, said in zip(roles, contents, strict=True)]
    for path in sorted(PUBLISHED.glob("*.jinja")):
        source = path.read_text()
        if "image" not in source or (placeholder := find_placeholder(source)) is None:
            continue
        expected = rendered_by_jinja(source, [{"role": role, "content": said} for role, said in zip(roles, chat, strict=True)])
        templates = ChatTemplates({"default": source}, NAMED_TOKENS)
        rendered = templates.render(ChatPrompt(messages, images=images, image_placeholder=placeholder))
        assert IMAGE_MARK.findall(rendered) == [mark[1:-1] for mark in marks], path.stem
        assert placeholder.join(IMAGE_MARK.split(rendered)[::2]) == expected, path.stem
        shown.append(path.stem)
    assert len(shown) >= 8, shown


@EVERY_KIND
def test_a_session_remembers_images(kind: Kind) -> None:
    used, transcripts = house_tokenizer(kind), Transcripts(1 << 20)
    turns: list[tuple[str, Parts]] = [("user", ["Here", 4, "is one."])]
    first = encode(used, prompt_of(kind, *turns), transcripts, key="s")
    answer = [*used.encode_part("s"), *used.encode_part("ee")]
    transcripts.record(first, [*answer, used.end_id])
    turns += [("assistant", ["see"]), ("user", ["And", 3, "?"])]
    second = encode(used, prompt_of(kind, *turns), transcripts, key="s")
    assert second.token_ids[: len(first.token_ids) + len(answer)] == (*first.token_ids, *answer)
    assert second.reused_tokens >= len(first.token_ids)
    assert [span.name for span in second.images] == [name_of(4), name_of(3)]
    assert as_transformers(encode(used, prompt_of(kind, *turns)).token_ids) == transformers_ids(kind, *turns)
    # Another picture at the same place: nothing behind it is known.
    turns[0] = ("user", ["Here", 2, "is one."])
    other = encode(used, prompt_of(kind, *turns), transcripts, key="s")
    assert other.reused_tokens <= first.images[0].start
    assert other.token_ids == encode(used, prompt_of(kind, *turns)).token_ids


def test_a_session_whose_prompt_ends_with_an_image() -> None:
    used, transcripts = make_tokenizer("idefics3", "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"), Transcripts(1 << 20)
    prompt = prompt_of("idefics3", ("user", ["a", 0]), begins_answer=False, continues=True)
    first = encode(used, prompt, transcripts, key="s")
    assert is_image_id(first.token_ids[-2])
    transcripts.record(first, [used.end_id])
    answer = [*used.encode_part("s"), *used.encode_part("ee")]
    transcripts.record(first, [*answer, used.end_id])
    second = encode(used, prompt_of("idefics3", ("user", ["a", 0, "see"])), transcripts, key="s")
    assert second.token_ids == (*first.token_ids, *answer, used.end_id)


def test_images_count_before_memory_is_taken_and_are_kept_in_the_memo() -> None:
    used, prompt, memo = house_tokenizer("idefics3"), prompt_of("idefics3", ("user", [0, "Look.", 0])), dict[str, bytes]()
    counted: list[int] = []
    first = encode(used, prompt, memo=memo, check=counted.append)
    assert counted == [len(first.token_ids)]
    transcripts = Transcripts(1 << 20)
    assert encode(used, prompt, transcripts, memo=memo).token_ids == first.token_ids
    assert transcripts.tokens_encoded == 0

    def refuse(tokens: int) -> None:
        raise RequestError(f"{tokens} tokens are too many")

    with pytest.raises(RequestError, match=f"{len(first.token_ids)} tokens are too many"):
        encode(used, prompt, check=refuse)


@EVERY_KIND
def test_marks_for_the_cache_count_the_tokens_of_images(kind: Kind) -> None:
    used = house_tokenizer(kind)
    prompt = prompt_of(kind, ("user", ["One. ", 0, "Two.", 1]))
    length = len(prompt.messages[0]["content"])
    places = [Place(0, 5), Place(0, 5 + MARK_CHARACTERS), Place(0, length - MARK_CHARACTERS), Place(0, length)]
    encoded = encode(used, prompt, places=places)
    first, second = encoded.images
    assert encoded.marks[1:] == (first.end, second.start, second.end)
    assert first.start - 1 <= encoded.marks[0] <= first.start


def test_the_simulator_reads_images() -> None:
    used, rules = WordTokenizer(), simulator.make_rules()
    images = {name_of(number): layout(rules, name_of(number), (40, 20)) for number in range(2)}
    prompt = ChatPrompt([message_of("user", ["look at ", 0, " and ", 1])], images=images)
    for key in (None, "s"):
        encoded = encode(used, prompt, key=key)
        assert [(span.name, span.end - span.start, span.grid) for span in encoded.images] == [
            (name_of(each), 6, (2, 3)) for each in range(2)
        ]
        text = [each for each in encoded.token_ids if not is_image_id(each)]
        assert used.decode(text) == "userlook at  and assistant"
    tight = structs.replace(prompt, messages=[message_of("user", ["look", 0])])
    assert encode(used, tight, places=[Place(0, 4)]).marks == (encode(used, tight).images[0].start,)


def test_text_takes_four_bytes_a_token_in_a_session_with_images() -> None:
    used, words = house_tokenizer("qwen3_vl"), "water " * 3000
    sizes = []
    both_parts: list[Parts] = [[words], [words, 0]]
    for parts in both_parts:
        transcripts = Transcripts(1 << 20)
        encoded = encode(used, prompt_of("qwen3_vl", ("user", parts), ("assistant", ["so"]), ("user", ["more"])), transcripts, key="s")
        sizes.append((transcripts.bytes, len(encoded.token_ids)))
    (without, text), (with_image, both) = sizes
    assert with_image - without <= 8 * (both - text) + 3000 + MARK_CHARACTERS * 4


def test_no_client_can_send_a_mark() -> None:
    """A mark is a part of JSON only as an escape, which decoders refuse or pair."""
    import msgspec

    for escaped in (r"\ud807", r"\ud808", r"\ud807\ud807"):
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(f'"{escaped}"')
    assert json.loads(r'"\ud807"') == "\ud807"
