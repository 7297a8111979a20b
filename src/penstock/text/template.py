"""A model's chat templates: Jinja in its immutable sandbox, with what templates for Hugging Face's libraries expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from msgspec import structs

from penstock.text.tokenizers.tokenizer import DEFAULT_TEMPLATE, ChatMessage, ChatPrompt
from penstock.text.tool_prompt import calls_as_text, tools_in_system, tools_in_user
from penstock.wire.errors import ConfigError, PenstockError, RequestError

TOOL_USE = "tool_use"

MAX_CHARACTERS = 64 * 2**20
"""A longer rendered chat is refused."""

MAX_REASON_CHARACTERS = 500

# Put after the content to continue, to find its end again. UTF-8 has no bytes for a surrogate, so no message can contain it. The space
# shows whether the template trims.
_MARK = "\ud803"
_MARK_AND_SPACE = f"{_MARK} "

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now")


class ChatTemplates:
    """The templates of one model, by name. A prompt that names none gets `default`; one with tools gets `tool_use` if there is one.

    `source` is the template for a prompt with tools. `renders_tools`: that template renders tools itself; otherwise they are described in
    the system message. Raises ConfigError for a template with a syntax error.
    """

    def __init__(self, sources: Mapping[str, str], named_tokens: Mapping[str, str]) -> None:
        self._named_tokens = named_tokens
        self._templates = {name: ChatTemplate(source, named_tokens) for name, source in sources.items()}
        preferred = next((self._templates[name] for name in (TOOL_USE, DEFAULT_TEMPLATE, *sources) if name in sources), None)
        self.source = None if preferred is None else preferred.source
        self.renders_tools = preferred is not None and preferred.renders_tools

    def render(self, prompt: ChatPrompt) -> str:
        """Raises RequestError if the template refuses the prompt, and no other error."""
        if not self._templates:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages", code="no_chat_template")
        template = self._choose(prompt)
        for name in prompt.arguments:
            if name in _GIVEN or name in self._named_tokens:
                field = f"chat_template_kwargs.{name}"
                raise RequestError(f"`{field}` cannot be set by a request: expected an argument of the template itself", param=field)
        if prompt.continues:
            return _continued(template, prompt)
        return template.render(prompt)

    def _choose(self, prompt: ChatPrompt) -> ChatTemplate:
        preferred = (TOOL_USE, DEFAULT_TEMPLATE) if prompt.tools else (DEFAULT_TEMPLATE,)
        names = preferred if prompt.template is None else (prompt.template,)
        found = next((self._templates[name] for name in names if name in self._templates), None)
        if found is not None:
            return found
        known = ", ".join(repr(name) for name in sorted(self._templates))
        said = "missing, and the model has no default" if prompt.template is None else repr(prompt.template[:100])
        raise RequestError(f"`chat_template` is {said}: expected the name of one of the model's templates: {known}", param="chat_template")


class ChatTemplate:
    """One template. Tools and tool calls that it does not render itself are written into the messages as text."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            syntax = environment.parse(source)
            self._compiled = environment.from_string(syntax)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template has an error in line {error.lineno}: {error.message}") from error
        self.source = source
        self._named_tokens = named_tokens
        self.renders_tools = any(name.name == "tools" and name.ctx == "load" for name in syntax.find_all(jinja2.nodes.Name))
        self._renders_calls = _mentions(syntax, "tool_calls")
        self._renders_system = self.renders_tools or self._shows_system()

    def render(self, prompt: ChatPrompt) -> str:
        prompt = self._adapted(prompt)
        values = {
            **prompt.arguments,
            **self._named_tokens,
            "messages": [_with_thinking(message) for message in prompt.messages],
            "tools": list(prompt.tools) or None,
            "documents": list(prompt.documents) or None,
            "add_generation_prompt": prompt.begins_answer,
            "continue_final_message": prompt.continues,
        }
        try:
            return self._joined(values)
        except PenstockError:
            raise
        # A template can raise anything for messages that it was not written for.
        except Exception as error:
            reason = (str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}")[:MAX_REASON_CHARACTERS]
            raise RequestError(f"the model's chat template refuses these messages: {reason}", param="messages") from error

    def _joined(self, values: Mapping[str, Any]) -> str:
        pieces = []
        size = 0
        for piece in self._compiled.generate(values):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise RequestError(f"`messages` make a prompt of more than {MAX_CHARACTERS:,} characters", param="messages")
        return "".join(pieces)

    def _adapted(self, prompt: ChatPrompt) -> ChatPrompt:
        messages: Sequence[ChatMessage] = prompt.messages
        if not self._renders_calls:
            messages = calls_as_text(messages)
        if prompt.tools and not self.renders_tools:
            messages = (tools_in_system if self._renders_system else tools_in_user)(messages, prompt.tools)
        return prompt if messages is prompt.messages else structs.replace(prompt, messages=messages)

    def _shows_system(self) -> bool:
        """Whether a system message becomes part of the prompt. Some templates refuse it, others leave it out."""
        messages = [ChatMessage(role="system", content=_MARK), ChatMessage(role="user", content="")]
        try:
            return _MARK in self.render(ChatPrompt(messages))
        except RequestError:
            return False


def _continued(template: ChatTemplate, prompt: ChatPrompt) -> str:
    """The rendered text, cut where the content of the last message ends."""
    field = "continue_final_message"
    if prompt.begins_answer:
        raise RequestError(f"`{field}` and `add_generation_prompt` cannot be combined: expected at most one of them", param=field)
    if not prompt.messages:
        raise RequestError(f"`{field}` is set, but `messages` is empty", param=field)
    *before, last = prompt.messages
    marked = ChatMessage({**last, "content": last["content"] + _MARK_AND_SPACE})
    rendered = template.render(structs.replace(prompt, messages=[*before, marked]))
    end = rendered.rfind(_MARK)
    text = rendered[:end] if rendered.startswith(_MARK_AND_SPACE, end) else rendered[:end].rstrip()
    if end < 0 or not text.rstrip().endswith(last["content"].strip()):
        raise RequestError(f"`{field}` is set, but the model's chat template changes the content of the last message", param=field)
    return text


def _with_thinking(message: ChatMessage) -> Mapping[str, Any]:
    # Some templates use this name for the reasoning.
    return {"thinking": message["reasoning_content"], **message} if "reasoning_content" in message else message


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text, for training. Here only its content counts."""

    tags = {"generation"}  # noqa: RUF012, an extension declares its tags so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _mentions(syntax: jinja2.nodes.Template, key: str) -> bool:
    """Whether a template uses this key, as an attribute or as a string."""
    attributes = any(node.attr == key for node in syntax.find_all(jinja2.nodes.Getattr))
    return attributes or any(node.value == key for node in syntax.find_all(jinja2.nodes.Const))
