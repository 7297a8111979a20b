"""Chat templates render as with Hugging Face's renderer. What they refuse is a client error."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chat_templates import HERMES, LLAMA3, PLAIN, SAID, TEMPLATES
from penstock.text.rewrites import system_in_user
from penstock.text.template import ChatTemplates
from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, ToolCall
from penstock.wire.errors import ConfigError, RequestError
from tokenizer_kinds import encode_chat

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <in> a city & such: größer",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = ToolCall(id="abcdefghi", type="function", function={"name": "get_weather", "arguments": {"city": "Köln", "at": 3}})
ASKED: list[ChatMessage] = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": " Wetter in Köln? "}]
CALLED: list[ChatMessage] = [
    *ASKED,
    {"role": "assistant", "content": "", "reasoning_content": "Let me look.", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"rain": true}', "tool_call_id": "abcdefghi"},
    {"role": "tool", "content": "12 °C", "tool_call_id": "abcdefghi"},
]
ANSWERED: list[ChatMessage] = [*ASKED, {"role": "assistant", "content": "It rains", "reasoning_content": "Rain."}]
CHATS = {"asked": ASKED, "called": CALLED, "answered": ANSWERED, "alone": [ASKED[1]]}


@functools.cache
def library() -> Library:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Library(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def make(template: str | Mapping[str, str] | None) -> ModelTokenizer:
    return ModelTokenizer(library(), NAMED, template)


def expected(template: str | Mapping[str, str], prompt: ChatPrompt) -> str:
    """What transformers renders."""
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=library(), **NAMED)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = template
    rendered = tokenizer.apply_chat_template(
        json.loads(json.dumps(prompt.messages)),
        tools=[dict(tool) for tool in prompt.tools] or None,
        documents=[dict(document) for document in prompt.documents] or None,
        chat_template=prompt.template,
        add_generation_prompt=prompt.begins_answer,
        continue_final_message=prompt.continues,
        tokenize=False,
        **prompt.arguments,
    )
    assert isinstance(rendered, str)
    return rendered


KNOWS_TOOLS = ("hermes", "llama3", "mistral")
CASES = [
    (name, chat, tools)
    for name in (*KNOWS_TOOLS, "documents", "generation")
    for chat in CHATS
    for tools in ((), (TOOL, TOOL))
    if name in KNOWS_TOOLS or not (tools or chat == "called")
]


@pytest.mark.parametrize(("name", "chat", "tools"), CASES)
@pytest.mark.parametrize("begins_answer", [True, False])
def test_renders_as_transformers_does(name: str, chat: str, begins_answer: bool, tools: tuple[Any, ...]) -> None:
    documents = [{"title": f"{index}", "text": "<b>"} for index in range(4)]
    prompt = ChatPrompt(CHATS[chat], tools=tools, documents=documents, begins_answer=begins_answer)
    # Mistral's templates show the instructions only if the user speaks last.
    shown = system_in_user(prompt.messages) if name == "mistral" else prompt.messages
    assert make(TEMPLATES[name]).render_chat(prompt) == expected(TEMPLATES[name], structs.replace(prompt, messages=shown))


@pytest.mark.parametrize("arguments", [{"enable_thinking": False}, {"enable_thinking": True}, {"unknown": [1, {"a": None}]}])
def test_arguments_reach_the_template(arguments: dict[str, Any]) -> None:
    prompt = ChatPrompt(ASKED, arguments=arguments)
    rendered = make(HERMES).render_chat(prompt)
    assert rendered == expected(HERMES, prompt)
    assert rendered.endswith("</think>\n\n") == (arguments.get("enable_thinking") is False)


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "raise_exception"])
def test_arguments_do_not_replace_what_is_given(name: str) -> None:
    with pytest.raises(RequestError, match=f"`chat_template_kwargs.{name}`") as caught:
        make(HERMES).render_chat(ChatPrompt(ASKED, arguments={name: "x"}))
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_templates_are_chosen_by_name_and_by_tools() -> None:
    named = {
        "default": f"plain{{% if tools %}} {{{{ tools }}}}{{% endif %}}{SAID}",
        "tool_use": f"tools {{{{ tools }}}}{SAID}",
        "rag": f"rag{SAID}",
    }
    tokenizer = make(named)
    for prompt in (
        ChatPrompt(ASKED),
        ChatPrompt(ASKED, tools=[TOOL]),
        ChatPrompt(ASKED, template="rag"),
        ChatPrompt(ASKED, tools=[TOOL], template="default"),
    ):
        assert tokenizer.render_chat(prompt) == expected(named, prompt)
    with pytest.raises(RequestError, match=r"`chat_template` is 'other': expected .*'default', 'rag', 'tool_use'"):
        tokenizer.render_chat(ChatPrompt(ASKED, template="other"))
    assert tokenizer.chat_template == named["tool_use"]
    with pytest.raises(RequestError, match=r"missing, and the model has no default: .*'rag'"):
        make({"rag": "rag"}).render_chat(ChatPrompt(ASKED))


def test_templates_of_a_directory(tmp_path: Path) -> None:
    said = "".join(message["content"] for message in ASKED)
    library().save(str(tmp_path / "tokenizer.json"))
    configured = [{"name": "default", "template": f"one{SAID}"}, {"name": "rag", "template": f"two{SAID}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**NAMED, "chat_template": configured}))
    assert pack_tokenizer(tmp_path).load().render_chat(ChatPrompt(ASKED)) == f"one{said}"
    (tmp_path / "chat_template.jinja").write_text(f"three{SAID}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
        f"four {{{{ tools | length }}}} {{{{ tools[0].function.name }}}}{SAID}"
    )
    tokenizer = pack_tokenizer(tmp_path).load()
    reference = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for prompt, text in (
        (ChatPrompt(ASKED), f"three{said}"),
        (ChatPrompt(ASKED, tools=[TOOL]), f"four 1 get_weather{said}"),
        (ChatPrompt(ASKED, template="rag"), f"two{said}"),
    ):
        assert tokenizer.render_chat(prompt) == text
    assert reference.apply_chat_template(ASKED, tokenize=False) == f"three{said}"
    assert reference.apply_chat_template(ASKED, tools=[TOOL], tokenize=False) == f"four 1 get_weather{said}"


@pytest.mark.parametrize("wrong", [[{"name": "default"}], ["x"], {"default": "x"}, 3])
def test_an_invalid_template_setting_is_named(wrong: Any, tmp_path: Path) -> None:
    library().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**NAMED, "chat_template": wrong}))
    with pytest.raises(ConfigError, match=r"chat_template has .*: expected one template, or an array"):
        pack_tokenizer(tmp_path).load()


@pytest.mark.parametrize("name", ["hermes", "llama3", "plain", "documents"])
@pytest.mark.parametrize("content", ["It rains", "It rains ", "It\nrains\n\n", "rains"])
def test_the_last_message_is_continued(name: str, content: str) -> None:
    messages: list[ChatMessage] = [*ASKED, {"role": "assistant", "content": content}]
    prompt = ChatPrompt(messages, begins_answer=False, continues=True)
    rendered = make(TEMPLATES[name]).render_chat(prompt)
    assert rendered == expected(TEMPLATES[name], prompt)
    assert rendered.rstrip().endswith(content.strip())
    assert "\ud803" not in rendered


def test_repeated_content_is_cut_after_its_last_occurrence() -> None:
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    messages: list[ChatMessage] = [{"role": "user", "content": "rain"}, {"role": "assistant", "content": "rain"}]
    assert make(template).render_chat(ChatPrompt(messages, begins_answer=False, continues=True)) == "rain|rain"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (PLAIN, ChatPrompt(ANSWERED, continues=True)),
        (PLAIN, ChatPrompt([], begins_answer=False, continues=True)),
        (HERMES, ChatPrompt(CALLED[:3], begins_answer=False, continues=True)),
        (
            "{% for m in messages %}{{ m.content | replace('rains', '') }}{% endfor %}",
            ChatPrompt(ANSWERED, begins_answer=False, continues=True),
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(template: str, prompt: ChatPrompt) -> None:
    with pytest.raises(RequestError, match="`continue_final_message`") as caught:
        make(template).render_chat(prompt)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such roles') }}",
        "{{ messages.nothing.more }}",
        "{{ messages[99].content }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ 1.5e308 | int ** 2.5 }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(content='') }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ strftime_now(1) }}",
        "{{ undefined_function() }}",
        "{{ {1: 2} | tojson(nothing=1) }}",
        "{{ '%d' | format('x') }}",
        "{% for i in range(100000000) %}x{% endfor %}",
    ],
)
def test_whatever_a_template_raises_is_the_clients_mistake(template: str) -> None:
    with pytest.raises(RequestError, match="the model's chat template refuses these messages: ") as caught:
        make(template).render_chat(ChatPrompt(ASKED))
    assert (caught.value.param, caught.value.status) == ("messages", 400)
    assert len(caught.value.message) < 600


def test_a_rendered_chat_has_a_limit() -> None:
    template = "{% for m in messages %}{% for i in range(1000) %}{{ m.content }}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="more than 67,108,864 characters"):
        make(template).render_chat(ChatPrompt([{"role": "user", "content": "x" * 1_000_000}]))


def test_variables_of_a_generation_block_end_with_it() -> None:
    template = SAID + "{% set x = 'a' %}{% generation %}{{ x }}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}"
    rendered = make(template).render_chat(ChatPrompt(ASKED))
    assert rendered == expected(template, ChatPrompt(ASKED))
    assert rendered.endswith("aba")


def test_json_is_plain() -> None:
    assert make("{{ messages | tojson }}").render_chat(ChatPrompt([{"role": "user", "content": "<ö> & '\"'"}])) == (
        '[{"role": "user", "content": "<ö> & \'\\"\'"}]'
    )


def test_reasoning_is_also_available_as_thinking() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.thinking or '-' }};{% endfor %}"
    prompt = ChatPrompt(ANSWERED, begins_answer=False)
    rendered = make(template).render_chat(prompt)
    assert rendered == expected(template, prompt)
    assert rendered.endswith("It rainsRain.;")


def test_a_model_without_a_template() -> None:
    tokenizer = make(None)
    assert (tokenizer.chat_template, tokenizer.renders_tools) == (None, False)
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat(ChatPrompt(ASKED))


@pytest.mark.parametrize("template", ["{% for %}", "{% generation %}", "{{ x | no_such_filter }}", "{% break"])
def test_a_template_with_a_syntax_error_is_refused_at_start(template: str) -> None:
    with pytest.raises(ConfigError, match="chat template has an error in line 1"):
        ChatTemplates({"default": template}, NAMED)


# Templates that do not render tools.


def test_tools_are_described_if_the_template_does_not_render_them() -> None:
    tokenizer = make(PLAIN)
    assert not tokenizer.renders_tools
    assert make(HERMES).renders_tools
    assert make(LLAMA3).renders_tools
    rendered = tokenizer.render_chat(ChatPrompt(CALLED, tools=[TOOL]))
    system, user, called, returned, begun = rendered.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief. \n\n")
    assert f"<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>" in system
    assert user == "user\n Wetter in Köln? <|im_end|>\n"
    assert called == ('assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "at": 3}}\n</tool_call><|im_end|>\n')
    assert returned == ('user\n<tool_response>\n{"rain": true}\n</tool_response>\n<tool_response>\n12 °C\n</tool_response><|im_end|>\n')
    assert begun == "assistant\n"


def test_calls_are_written_out_without_tools_as_well() -> None:
    messages: list[ChatMessage] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "So:", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "abcdefghi"},
        {"role": "user", "content": "!"},
    ]
    rendered = make(PLAIN).render_chat(ChatPrompt(messages))
    assert "tools" not in rendered
    assert rendered.count("\n<tool_call>\n") == 2
    assert "assistant\nSo:\n<tool_call>" in rendered
    assert "user\n<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>user\n!<|im_end|>" in rendered
    assert messages[1]["tool_calls"] == [CALL, CALL]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.role }}:{{ m.content }}|{% endfor %}",
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}:{{ m.content }}|{% endif %}{% endfor %}",
    ],
)
def test_without_a_system_message_the_user_describes_the_tools(template: str) -> None:
    messages: list[ChatMessage] = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    first, second, _ = make(template).render_chat(ChatPrompt(messages, tools=[TOOL])).split("|")
    assert first.startswith("user:You can call tools.")
    assert first.endswith("\n\none")
    assert second == "user:two"


def test_the_default_model_gets_its_tools() -> None:
    from penstock.engine.checkpoints.checkpoint import find_default_model

    tokenizer = pack_tokenizer(find_default_model()).load()
    assert tokenizer.chat_template is not None
    assert not tokenizer.renders_tools
    rendered = tokenizer.render_chat(ChatPrompt([ASKED[1]], tools=[TOOL]))
    assert rendered.startswith("<|im_start|>system\nYou can call tools.")
    assert rendered.endswith("<|im_start|>user\n Wetter in Köln? <|im_end|>\n<|im_start|>assistant\n")


# The built-in tokenizer.


def test_words_render_tools_and_calls() -> None:
    words = pack_tokenizer(None).load()
    prompt = ChatPrompt(CALLED, tools=[TOOL], documents=[{"title": "t"}])
    text = words.decode(encode_chat(words, prompt))
    assert text.startswith('tools{"type": "function"')
    assert 'documents{"title": "t"}' in text
    assert 'assistant<tool_call>\n{"name": "get_weather"' in text
    assert text.endswith("assistant")
    assert encode_chat(words, prompt) == encode_chat(words, prompt) != encode_chat(words, ChatPrompt(CALLED))
    ended = encode_chat(words, ChatPrompt(ANSWERED, begins_answer=False))
    assert encode_chat(words, ChatPrompt(ANSWERED, begins_answer=False, continues=True)) == ended[:-1]
    for wrong in (ChatPrompt(ASKED, template="x"), ChatPrompt(ASKED, continues=True)):
        with pytest.raises(RequestError):
            words.render_chat(wrong)
