"""A model's chat templates: Jinja in its immutable sandbox, with what templates for Hugging Face's libraries expect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from msgspec import structs

from penstock.text.fitting import PLAIN, PROBE_TOOLS, fit, image_probes, marked, unmarked, unseen
from penstock.text.images import EDGE, IMAGE_MARK, as_parts, count_marks, with_marks, without_marks, without_placeholders
from penstock.text.rewrites import Messages, Rewrite, known_roles, named_results
from penstock.text.tokenizers.tokenizer import DEFAULT_TEMPLATE, ChatMessage, ChatPrompt
from penstock.text.tool_prompt import tools_in_system
from penstock.wire.errors import ConfigError, MessageError, PenstockError, RequestError

TOOL_USE = "tool_use"

MAX_CHARACTERS = 64 * 2**20
"""A longer rendered chat is refused."""

MAX_REASON_CHARACTERS = 500

# Put after the content to continue, to find its end again. UTF-8 has no bytes for a surrogate, so no message can contain it. The space
# shows whether the template trims.
_MARK = "\ud803"
_MARK_AND_SPACE = f"{_MARK} "

# The key of a message's place in the request, while the one that a template refuses is looked for.
_PLACE = "_place"

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now")


class ChatTemplates:
    """The templates of one model, by name. A prompt that names none gets `default`; one with tools gets `tool_use` if there is one.

    `source` is the template for a prompt with tools. `renders_tools`: that template renders tools itself; otherwise they are described in
    the system message. `losses` says what the templates cannot render. Raises ConfigError for a template with a syntax error.
    """

    def __init__(self, sources: Mapping[str, str], named_tokens: Mapping[str, str]) -> None:
        self._named_tokens = named_tokens
        self._templates = {name: ChatTemplate(source, named_tokens) for name, source in sources.items()}
        preferred = next((self._templates[name] for name in (TOOL_USE, DEFAULT_TEMPLATE, *sources) if name in sources), None)
        self.source = None if preferred is None else preferred.source
        self.renders_tools = preferred is not None and preferred.renders_tools
        self.losses = [f"{name!r} cannot render {loss}" for name, template in self._templates.items() for loss in template.losses]

    def render(self, prompt: ChatPrompt) -> str:
        """Raises RequestError if the template refuses the prompt, and no other error."""
        if not self._templates:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages", code="no_chat_template")
        template = self._choose(prompt)
        for name in prompt.arguments:
            if name in _GIVEN or name in self._named_tokens:
                field = f"chat_template_kwargs.{name}"
                raise RequestError(f"`{field}` cannot be set by a request: expected an argument of the template itself", param=field)
        if prompt.images and prompt.image_placeholder:
            prompt = without_placeholders(prompt)
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
    """One template. What it would leave out or refuse is rewritten: tools that it does not know, and the shapes of chats in `fitting`.

    `losses` says which shapes it cannot render in any way. `render` never returns a prompt without the text of a message, or without one
    of its images: each image is a mark there. The template gets a content with images as a list of parts if it writes the model's
    placeholder in messages of that role. It gets other contents as lists if it loses strings. Otherwise contents are strings.
    """

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
        self._lists_no_tools = False
        self._lists_parts = False
        self._rewrites, self.losses = self._fitted()
        self._probes = {role: self._probe(chat, role) for role, chat in image_probes()}

    def render(self, prompt: ChatPrompt) -> str:
        """Raises MessageError if the template refuses a message or leaves out its text."""
        rendered = self._render(prompt, self._rewrites)
        # A short text may be found in another message. That is enough only if the template has rendered all trials.
        if suspects := range(len(prompt.messages)) if self.losses else unseen(prompt.messages, rendered):
            again = self._render(structs.replace(prompt, messages=marked(prompt.messages, suspects)), self._rewrites)
            for place in unmarked(prompt.messages, suspects, again):
                raise MessageError(place, f"the model's chat template leaves out text of this {prompt.messages[place]['role']} message")
        if prompt.images:
            self._check_images(prompt, rendered)
        # The template has rendered all of them or none.
        if prompt.tools and prompt.tools[-1]["function"]["name"] not in rendered:
            raise RequestError("`tools`: the model's chat template leaves them out of this chat", param="tools", code="unsupported_message")
        return rendered

    def _check_images(self, prompt: ChatPrompt, rendered: str) -> None:
        """Raises MessageError for the first message with an image that is not in the prompt."""
        given = [message for message in prompt.messages if EDGE in message["content"]]
        if count_marks([rendered]) == count_marks([message["content"] for message in given]):
            if len({message["role"] for message in given}) > 1:
                self._check_order(prompt, rendered)
            return
        for place, message in enumerate(prompt.messages):
            if EDGE in message["content"]:
                alone = [each if each is message else without_marks(each) for each in prompt.messages]
                again = self._render(structs.replace(prompt, messages=alone), self._rewrites)
                if count_marks([again]) != count_marks([message["content"]]):
                    raise MessageError(place, f"the model's chat template leaves out or repeats an image of this {message['role']} message")
        raise RequestError("the model's chat template leaves out or repeats an image", param="messages", code="unsupported_message")

    def _check_order(self, prompt: ChatPrompt, rendered: str) -> None:
        """Placeholders do not tell which image they are. If the template moves messages of a role, marks as text show it."""
        as_text = self._render(prompt, self._rewrites, roles=())
        if IMAGE_MARK.findall(as_text) != IMAGE_MARK.findall(rendered):
            raise RequestError("the model's chat template changes the order of images", param="messages", code="unsupported_message")

    def _fitted(self) -> tuple[Sequence[Rewrite], Sequence[str]]:
        rewrites, losses = self._fitted_to_tools()
        if losses and losses[0].startswith(PLAIN):
            # A template for images may know only lists of parts.
            self._lists_parts = True
            others, remaining = self._fitted_to_tools()
            if not remaining or not remaining[0].startswith(PLAIN):
                return others, remaining
            self._lists_parts = False
        return rewrites, losses

    def _fitted_to_tools(self) -> tuple[Sequence[Rewrite], Sequence[str]]:
        def render(messages: Messages, rewrites: Sequence[Rewrite], has_tools: bool) -> str:
            return self._render(ChatPrompt(messages, tools=PROBE_TOOLS if has_tools and self.renders_tools else ()), rewrites)

        rewrites, losses = fit(render)
        if losses:
            # A template for chats with tools may need a list of them.
            self._lists_no_tools = True
            others, remaining = fit(render)
            if not remaining:
                return others, remaining
            self._lists_no_tools = False
        return rewrites, losses

    def _probe(self, chat: Messages, role: str) -> str:
        """What the template makes of a chat with an image in a message of this role. Nothing if it refuses it or leaves out its text."""
        try:
            rendered = self._render(ChatPrompt(chat), self._rewrites, roles=[role])
        except RequestError:
            return ""
        texts = [text for message in chat for text in IMAGE_MARK.split(message["content"])[::2]]
        return rendered if all(text in rendered for text in texts) else ""

    def _image_roles(self, placeholder: str) -> list[str]:
        """The roles of messages in which the template writes this placeholder for an image."""
        return [role for role, probe in self._probes.items() if placeholder and probe.count(placeholder) == 1]

    def _render(
        self, prompt: ChatPrompt, rewrites: Sequence[Rewrite], read: list[int] | None = None, roles: Sequence[str] | None = None
    ) -> str:
        """`read` gets the place of the message that the template read last. It is empty if that was a tool. Images in messages of these
        `roles` are parts, and marks again in what is returned; with roles of a caller, they are what the template has written."""
        is_trial = roles is not None
        try:
            messages = self._rewritten(prompt if read is None else _placed(prompt), rewrites)
            if roles is None:
                roles = self._image_roles(prompt.image_placeholder) if prompt.images else ()
            shown = self._shown(messages, roles)
            tools: Sequence[Mapping[str, Any]] = prompt.tools
            if read is not None:
                shown, tools = [_Watched(message, read) for message in shown], [_Watched(tool, read) for tool in tools]
            rendered = self._filled_in(prompt, shown, list(tools))
            return _marked_again(rendered, prompt, messages, roles) if roles and not is_trial else rendered
        except PenstockError:
            raise
        # A template can raise anything for messages that it was not written for.
        except Exception as error:
            if read is None:
                return self._render(prompt, rewrites, [], roles if is_trial else None)
            reason = (str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}")[:MAX_REASON_CHARACTERS]
            if read:
                role = prompt.messages[read[-1]]["role"]
                raise MessageError(read[-1], f"the model's chat template refuses this {role} message: {reason}") from error
            raise RequestError(f"the model's chat template refuses these messages: {reason}", param="messages") from error

    def _shown(self, messages: Messages, roles: Sequence[str]) -> list[_Shown]:
        """The messages as the template reads them. Those of these roles have their images as parts."""
        shown = [_with_thinking(message) for message in messages]
        if roles or self._lists_parts:
            shown = [self._with_parts(message, roles) for message in shown]
        return [_Shown(message) for message in shown]

    def _with_parts(self, message: Mapping[str, Any], roles: Sequence[str]) -> Mapping[str, Any]:
        content = message["content"]
        if message["role"] in roles and EDGE in content:
            return {**message, "content": as_parts(content)}
        return {**message, "content": [{"type": "text", "text": content}]} if self._lists_parts else message

    def _rewritten(self, prompt: ChatPrompt, rewrites: Sequence[Rewrite]) -> Messages:
        messages = named_results(known_roles(prompt.messages))
        if prompt.tools and not self.renders_tools:
            messages = tools_in_system(messages, prompt.tools)
        for rewrite in rewrites:
            messages = rewrite(messages)
        return messages

    def _filled_in(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]], tools: list[Mapping[str, Any]]) -> str:
        values = {
            **prompt.arguments,
            **self._named_tokens,
            "messages": list(messages),
            # A new list each time: templates may append to it.
            "tools": tools or ([] if self._lists_no_tools else None),
            "documents": list(prompt.documents) or None,
            "add_generation_prompt": prompt.begins_answer,
            "continue_final_message": prompt.continues,
        }
        pieces = []
        size = 0
        for piece in self._compiled.generate(values):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise RequestError(f"`messages` make a prompt of more than {MAX_CHARACTERS:,} characters", param="messages")
        return "".join(pieces)


def _continued(template: ChatTemplate, prompt: ChatPrompt) -> str:
    """The rendered text, cut where the content of the last message ends."""
    field = "continue_final_message"
    if prompt.begins_answer:
        raise RequestError(f"`{field}` and `add_generation_prompt` cannot be combined: expected at most one of them", param=field)
    if not prompt.messages:
        raise RequestError(f"`{field}` is set, but `messages` is empty", param=field)
    *before, last = prompt.messages
    if last.get("tool_calls"):
        raise RequestError(f"`{field}` is set, but the last message ends with tool calls: expected one that ends with text", param=field)
    marked = ChatMessage({**last, "content": last["content"] + _MARK_AND_SPACE})
    rendered = template.render(structs.replace(prompt, messages=[*before, marked]))
    end = rendered.rfind(_MARK)
    text = rendered[:end] if rendered.startswith(_MARK_AND_SPACE, end) else rendered[:end].rstrip()
    if end < 0 or not text.rstrip().endswith(last["content"].strip()):
        raise RequestError(f"`{field}` is set, but the model's chat template changes the content of the last message", param=field)
    return text


def _marked_again(rendered: str, prompt: ChatPrompt, messages: Messages, roles: Sequence[str]) -> str:
    """Placeholders become the marks of these messages, in order."""
    names = [name for message in messages if message["role"] in roles for name in IMAGE_MARK.findall(message["content"])]
    return with_marks(rendered, prompt.image_placeholder, names)


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    # Some templates use this name for the reasoning.
    return {"thinking": message["reasoning_content"], **message} if "reasoning_content" in message else message


def _placed(prompt: ChatPrompt) -> ChatPrompt:
    """The prompt with each message's place in it, which rewrites keep."""
    placed = [cast(ChatMessage, {**message, _PLACE: place}) for place, message in enumerate(prompt.messages)]
    return structs.replace(prompt, messages=placed)


class _Shown(dict[str, Any]):
    """A message in a template. It equals only itself: Mistral's templates put the tools before each message that equals the user's last."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


class _Watched(_Shown):
    """A message or a tool that notes its place when it is read, if it has one."""

    def __init__(self, message: Mapping[str, Any], read: list[int]) -> None:
        super().__init__(message)
        self._place = self.pop(_PLACE, None)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        self._note()
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note()
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note()
        return super().get(key, default)

    def _note(self) -> None:
        self._read[:] = [] if self._place is None else [self._place]


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Nothing can be changed, except for lists by `append` and `pop`: some templates queue the ids of calls until their results."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (attr in ("append", "pop") and type(obj) is list) or super().is_safe_attribute(obj, attr, value)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols])
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed)


def _listed(value: Any) -> list[Any]:
    """What filters such as `map` return."""
    if not isinstance(value, Iterator):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return list(value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
