"""Chats are fitted to templates: nothing is lost, what cannot be rendered is refused by name, and prompts keep their prefixes."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from chat_templates import DROPPING, HERMES, PLAIN, PUBLISHED, REFUSING, TEMPLATES
from penstock.text.fitting import MAX_SEARCHED, shapes, unseen
from penstock.text.rewrites import Messages, Rewrite, known_roles, named_results
from penstock.text.template import ChatTemplates
from penstock.text.tokenizers.cache import TokenizerCache
from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.text.tokenizers.source import TokenizerSource, fingerprint
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, ToolCall
from penstock.text.transcript import Transcripts
from penstock.wire.errors import MessageError, RequestError

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def say(role: str, content: str) -> ChatMessage:
    return ChatMessage(role=role, content=content)


def calling(content: str, *names: str) -> ChatMessage:
    calls = [ToolCall(id=f"call_{name}", type="function", function={"name": name, "arguments": {"in": "it"}}) for name in names]
    return ChatMessage(role="assistant", content=content, tool_calls=calls)


def result(name: str, content: str) -> ChatMessage:
    return ChatMessage(role="tool", content=content, tool_call_id=f"call_{name}")


def render(template: str, messages: Messages, **fields: Any) -> str:
    return ChatTemplates({"default": template}, NAMED).render(ChatPrompt(messages, **fields))


@pytest.mark.parametrize("template", [PLAIN, HERMES, DROPPING["unknown roles"], DROPPING["later system messages"]])
def test_leading_instructions_are_one_system_message(template: str) -> None:
    rendered = render(template, [say("system", "one"), say("developer", "two"), say("system", "three"), say("user", "four")])
    assert rendered == render(template, [say("system", "one\n\ntwo\n\nthree"), say("user", "four")])
    assert "developer" not in rendered
    assert rendered.count("system") == 1


def test_later_instructions_stay_where_they_are() -> None:
    chat = [say("user", "one"), say("assistant", "two"), say("developer", "three"), say("user", "four")]
    assert "<|im_start|>system\nthree<|im_end|>\n<|im_start|>user\nfour" in render(PLAIN, chat)
    told = render(DROPPING["later system messages"], chat)
    assert "two<|end|><|user|><system-reminder>\nthree\n</system-reminder><|end|><|user|>four" in told
    after_result = [say("user", "one"), calling("", "look"), result("look", "two"), say("system", "three")]
    told = render(DROPPING["later system messages"], after_result)
    assert "<|tool|>two\n\n<system-reminder>\nthree\n</system-reminder><|end|><|assistant|>" in told


def test_later_instructions_do_not_move_to_the_head() -> None:
    """DeepSeek's templates collect all system messages there. Then no turn would find the KV of the one before it."""
    head = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    template = head + "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    chat = [say("system", "zero"), say("user", "one"), say("assistant", "two")]
    before = render(template, chat)
    told = render(template, [*chat, say("developer", "three"), say("user", "four")])
    assert told == before + "<|user|><system-reminder>\nthree\n</system-reminder><|user|>four"


def test_tools_are_in_the_prompt_once_though_messages_are_equal() -> None:
    """A template compares messages to find the user's last one. Those that fill gaps are equal, and so may be the user's own."""
    turn = [calling("plan", "look"), result("look", "red"), say("assistant", "ok"), say("user", "go on")]
    rendered = render(TEMPLATES["mistral"], [say("user", "go on"), *turn, *turn], tools=[TOOL])
    assert rendered.count("[AVAILABLE_TOOLS]") == 1


def test_results_have_the_names_of_their_tools() -> None:
    template = "{% for m in messages %}<{{ m.role }} {{ m.name }}>{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
    own = ChatMessage({**result("look", "blue"), "name": "own"})
    rendered = render(template, [say("user", "?"), calling("", "look", "feel"), result("feel", "soft"), result("look", "red"), own])
    assert rendered.endswith("<tool feel>soft[]<tool look>red[]<tool own>blue[]")


def test_parallel_calls_are_followed_by_their_own_results() -> None:
    chat = [say("user", "?"), calling("both:", "look", "feel"), result("feel", "soft"), result("look", "red")]
    for template in (REFUSING["several calls"], DROPPING["calls after the first"]):
        rendered = render(template, chat)
        places = [rendered.index(word) for word in ("both:", "look", "red", "feel", "soft")]
        assert places == sorted(places)


ALTERNATING = [say(role, f"text {turn}") for turn in range(6) for role in ("user", "assistant")]
EACH = "{{% for m in messages %}}{}{{{{ m.content }}}}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "place", "reason"),
    [
        (EACH.format("{% if m.content == 'text 3' %}{{ raise_exception('never') }}{% endif %}"), 6, "refuses this user message: never"),
        ("{{ messages[2].content.nothing.more }}", 2, "refuses this user message: 'str object' has no attribute 'nothing'"),
        ("{{ messages[0].content }}", 1, "leaves out text of this assistant message"),
        (
            "{% for m in messages %}{% if loop.index0 != 9 %}{{ m.content }}{% endif %}{% endfor %}",
            9,
            "leaves out text of this assistant message",
        ),
        ("{% for m in messages[:10] %}{{ m.content }}{% endfor %}", 10, "leaves out text of this user message"),
    ],
)
def test_what_is_lost_or_refused_is_named(template: str, place: int, reason: str) -> None:
    with pytest.raises(MessageError, match=reason) as caught:
        render(template, ALTERNATING)
    assert (caught.value.place, caught.value.param, caught.value.status) == (place, f"messages[{place}]", 400)
    assert caught.value.named("input[7]").message.startswith("`input[7]`: the model's chat template ")


def test_a_text_that_another_message_repeats_is_not_taken_for_the_message() -> None:
    template = "{% for m in messages %}{% if loop.index0 != 1 %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(MessageError, match=r"`messages\[1\]`: .* leaves out text of this assistant message"):
        render(template, [say("user", "Shall I look?"), say("assistant", "look"), say("user", "I look again.")])


def test_the_name_of_a_result_does_not_stand_for_its_call() -> None:
    refuses_plain_chats = "{% if messages | length == 3 and messages[2].role == 'user' %}{{ raise_exception('no') }}{% endif %}"
    template = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}" + refuses_plain_chats
    with pytest.raises(MessageError, match=r"`messages\[1\]`: .* leaves out text of this assistant message"):
        render(template, [say("user", "?"), calling("", "look"), result("look", "red")])


def test_a_template_that_adds_tools_to_its_list_adds_them_once() -> None:
    template = "{% for tool in tools %}{{ tool }}{% endfor %}{% set _ = tools.append('added') %}" + PLAIN
    templates = ChatTemplates({"default": template}, NAMED)
    first, second = (templates.render(ChatPrompt([say("user", "a")])) for _ in range(2))
    assert first == second


def test_tools_that_are_left_out_are_named() -> None:
    template = PLAIN + "{% if not messages[0].role == 'system' %}{{ tools }}{% endif %}"
    with pytest.raises(RequestError, match="`tools`: the model's chat template leaves them out"):
        render(template, [say("system", "a"), say("user", "b")], tools=[TOOL])


@pytest.mark.parametrize("content", ['a\n"quoted" line', "<think>\nold\n</think>\n\nnew", "  spaces  ", "é" * 100])
@pytest.mark.parametrize("shown", ["m.content | tojson", "m.content.split('</think>')[-1] | trim", "m.content | upper"])
def test_text_that_a_template_changes_is_not_lost(content: str, shown: str) -> None:
    template = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ {shown} }}}}{{% endfor %}}"
    rendered = render(template, [say("user", content), say("assistant", content), say("user", "end")])
    assert rendered.count("<user>") == 2
    assert "\ud804" not in rendered


def test_a_long_changed_text_is_not_searched_for() -> None:
    content = '"' * (MAX_SEARCHED + 1)
    shown = json.dumps(content)
    assert unseen([say("user", content[1:])], shown) == []
    assert unseen([say("user", content)], shown) == [0]
    assert unseen([say("user", content)], content) == []
    assert render("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", [say("user", content)]) == shown


def test_many_changed_texts_are_found_in_two_renderings() -> None:
    template = "{% for m in messages if m.content | trim %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}"
    chat = [say(role, f"text {turn}") for turn in range(500) for role in ("user", "assistant")]
    assert render(template, [*chat, say("user", " \n")]).count("TEXT") == 1000
    with pytest.raises(MessageError, match=r"`messages\[999\]`: .* leaves out"):
        render(template.replace("in messages if m.content | trim", "in messages[:999]"), chat)


def test_what_a_template_cannot_render_is_logged_when_it_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    async def load(template: str) -> None:
        data = msgspec.msgpack.encode(TokenizerSource(library().to_str(), NAMED, {"default": template}, 0))
        wanted = fingerprint(data)

        async def fetch() -> bytes:
            return data

        await TokenizerCache().load(wanted, fetch)

    with caplog.at_level(logging.WARNING):
        asyncio.run(load(PLAIN))
        assert not caplog.messages
        asyncio.run(load("{{ messages[0].content }}"))
    lost = "messages of user and assistant: left out of the prompt"
    assert caplog.messages == [f"the model's chat template 'default' cannot render {lost}; requests that need it are refused"]


def library(*special: str) -> Library:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Library(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *special])
    return tokenizer


REWRITES: list[Rewrite] = [
    known_roles,
    named_results,
    *dict.fromkeys(rewrite for shape in shapes() for way in shape.ways for rewrite in way),
]
TURNS = st.lists(
    st.sampled_from(["system", "developer", "user", "assistant", "call", "calls", "beside", "results", "result", "empty"]),
    min_size=1,
    max_size=12,
)


def chat_of(turns: list[str]) -> list[ChatMessage]:
    """A chat with these turns, each with a text of its own."""
    chat: list[ChatMessage] = []
    for turn, kind in enumerate(turns):
        match kind:
            case "call" | "beside":
                chat.append(calling(f"text {turn}" if kind == "beside" else "", f"one{turn}"))
            case "calls":
                chat.append(calling(f"text {turn}", f"one{turn}", f"two{turn}"))
            case "results" | "result":
                names = [call["function"]["name"] for message in chat for call in message.get("tool_calls", ())][-2:]
                chat += [result(name, f"result {turn} of {name}") for name in names[: 2 if kind == "results" else 1]]
            case "empty":
                chat.append(say("assistant", ""))
            case _:
                chat.append(say(kind, f"text {turn}"))
    return chat


@functools.cache
def every_template() -> list[ChatTemplates]:
    sources = [
        *TEMPLATES.values(),
        *DROPPING.values(),
        *REFUSING.values(),
        *[path.read_text() for path in sorted(PUBLISHED.glob("*.jinja"))],
    ]
    return [ChatTemplates({"default": source}, NAMED) for source in sources]


@given(TURNS, st.data())
def test_no_chat_loses_text(turns: list[str], data: st.DataObject) -> None:
    chat = chat_of(turns)
    for templates in data.draw(st.lists(st.sampled_from(every_template()), min_size=5, max_size=5)):
        try:
            rendered = templates.render(ChatPrompt(chat, tools=data.draw(st.sampled_from([[], [TOOL]]))))
        except RequestError as error:
            assert "the model's chat template" in error.message
            continue
        for message in chat:
            assert message["content"] in rendered
            assert all(call["function"]["name"] in rendered for call in message.get("tool_calls", ()))


@given(TURNS)
def test_a_rewritten_chat_begins_with_the_rewritten_chat_of_the_turn_before(turns: list[str]) -> None:
    chat = known_roles(chat_of(turns))
    ends = [
        place for place, message in enumerate(chat) if place and message["role"] == "assistant" and chat[place - 1]["role"] != "assistant"
    ]
    for rewrite in REWRITES:
        whole = rewrite(chat)
        for end in ends:
            before = rewrite(chat[:end])
            assert list(whole[: len(before)]) == list(before), rewrite.__name__


@given(TURNS)
def test_rewrites_keep_every_text_once_and_leave_the_chat_as_it_is(turns: list[str]) -> None:
    chat = chat_of(turns)
    kept = chat_of(turns)
    texts = [message["content"] for message in chat if message["content"]]
    names = [call["function"]["name"] for message in chat for call in message.get("tool_calls", ())]
    for rewrite in REWRITES:
        shown = str(rewrite(known_roles(chat)))
        assert all(shown.count(f"{text}") >= 1 for text in texts), rewrite.__name__
        assert all(f"{name}'" in shown or f'"{name}"' in shown for name in names), rewrite.__name__
    assert chat == kept


@pytest.mark.parametrize("name", ["two messages of one role", "turns that do not alternate", "several calls", "the role system"])
async def test_a_turn_tokenizes_only_what_is_new(name: str) -> None:
    tokenizer = ModelTokenizer(library("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"), NAMED, REFUSING[name])
    transcripts = Transcripts(1 << 20)
    chat = [say("developer", "rules"), say("system", "norms"), say("user", "?"), say("user", "!")]
    chat += [calling("plans", "look", "feel"), result("look", "red"), result("feel", "soft"), say("developer", "later")]
    before = [*chat, calling("", "look"), result("look", "blue")]
    await transcripts.encode_chat("session", "m", tokenizer, ChatPrompt(chat))
    for turn in (before, [*before, say("assistant", "so"), say("user", "and?")]):
        known = tokenizer.render_chat(ChatPrompt(chat))
        *parts, _ = tokenizer.parts(known)
        encoded = await transcripts.encode_chat("session", "m", tokenizer, ChatPrompt(turn))
        assert encoded.reused_tokens == sum(len(tokenizer.encode_part(part)) for part in parts)
        chat = turn
