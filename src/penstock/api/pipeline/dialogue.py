"""From a dialogue, in whatever API it came, to a plan: rendered, tokenized, with the parser and the grammar that its tools need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from penstock.api.auth.keys import Tenant
from penstock.api.models import ServedModel
from penstock.api.openai.schema import Common
from penstock.api.pipeline.incoming import Library
from penstock.api.pipeline.plan import Plan, Wishes, check_text_length, make_plan
from penstock.router.affinity import session_key
from penstock.router.policy import Hints
from penstock.text.formats.grammar import after_reasoning, tool_grammar
from penstock.text.formats.make import make_parser, opens_reasoning, visible_tokens
from penstock.text.tokenizers.tokenizer import ChatPrompt
from penstock.text.transcript import EncodedChat
from penstock.wire.errors import RequestError
from penstock.wire.messages import Grammar

DEFAULT_TOOL_FORMAT = "hermes"
"""What a model is told to write whose worker does not say."""


class ToolChoice(NamedTuple):
    """Which tools the model may or must call. `name` is the one that it must, with the mode `named`."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


AUTO = ToolChoice()
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def described_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates expect it."""
    fields = {"name": name, "description": description or "", "parameters": NO_PARAMETERS if parameters is None else parameters}
    return {"type": "function", "function": fields}


def check_names(names: Sequence[str], field: str) -> None:
    """Raises RequestError when two tools have one name. `field` is where each has it, with `{}` for its number."""
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            param = field.format(index)
            raise RequestError(f"`{param}` is {name!r}: another tool has that name already", param=param)
        seen.add(name)


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """What an endpoint makes of its request. `fields` names each message of the prompt in the request, for the errors.

    The tools that the model may call are those of the prompt. `grammar` is what the text of the answer must be.
    """

    prompt: ChatPrompt
    fields: Sequence[str]
    max_tokens: int | None = None
    logprobs: int | None = None
    tool_choice: ToolChoice = AUTO
    parallel_calls: bool = True
    grammar: Grammar | None = None
    grammar_field: str | None = None


async def plan_dialogue(request: Common, dialogue: Dialogue, hints: Hints, tenant: Tenant, library: Library) -> Plan:
    """Raises RequestError where it cannot be."""
    model = library.models.find(request.model)
    _check_lengths(model, dialogue)
    tools = _tools(dialogue)
    name = model.info.name
    key = None if hints.session is None else session_key(tenant.owner, name, hints.session.id)
    chat = await library.transcripts.encode_chat(key, name, model.tokenizer, dialogue.prompt)
    return make_plan(model, request, hints, tenant, [(_field(dialogue), chat.token_ids)], _wishes(model, dialogue, tools, chat))


async def count_tokens(model: ServedModel, dialogue: Dialogue, library: Library, key: str | None = None) -> int:
    """How many tokens the dialogue's prompt has: in the session with this key, if there is one."""
    _check_lengths(model, dialogue)
    return len((await library.transcripts.encode_chat(key, model.info.name, model.tokenizer, dialogue.prompt)).token_ids)


def _check_lengths(model: ServedModel, dialogue: Dialogue) -> None:
    for field, message in zip(dialogue.fields, dialogue.prompt.messages, strict=True):
        check_text_length(model, field, message["content"])


def _field(dialogue: Dialogue) -> str:
    """The field that all messages are in."""
    return dialogue.fields[-1].partition("[")[0]


def _tools(dialogue: Dialogue) -> dict[str, Mapping[str, Any]]:
    """The tools that may be called: the schema of each one's arguments by its name."""
    tools: dict[str, Mapping[str, Any]] = {}
    for tool in dialogue.prompt.tools:
        function = tool["function"]
        tools[function["name"]] = function["parameters"] or NO_PARAMETERS
    choice = dialogue.tool_choice
    if choice.mode == "none":
        return {}
    if choice.mode == "required" and not tools:
        raise RequestError("`tool_choice` is required: there are no `tools` to call", param="tool_choice")
    if choice.mode == "named":
        if choice.name is None or choice.name not in tools:
            known = ", ".join(f"`{name}`" for name in tools) or "none"
            raise RequestError(f"`tool_choice` names {choice.name!r}: the tools are {known}", param="tool_choice")
        return {choice.name: tools[choice.name]}
    return tools


def _wishes(model: ServedModel, dialogue: Dialogue, tools: Mapping[str, Mapping[str, Any]], chat: EncodedChat) -> Wishes:
    reasoning_format = model.info.reasoning_parser
    tool_format = (model.info.tool_parser or DEFAULT_TOOL_FORMAT) if tools else None
    inside = reasoning_format is not None and opens_reasoning(reasoning_format, chat.ending)
    grammar, field = dialogue.grammar, dialogue.grammar_field
    if tool_format is not None and dialogue.tool_choice.mode in ("required", "named"):
        if grammar is not None:
            raise RequestError(f"`tool_choice` that forces a call and `{field}` exclude each other", param="tool_choice")
        tool_format, grammar = tool_grammar(tool_format, tools, dialogue.parallel_calls, reasoning_format, inside)
        field = "tool_choice"
    elif grammar is not None:
        grammar = after_reasoning(grammar, reasoning_format, inside)
    parser = partial(make_parser, tool_format, reasoning_format, tools, inside) if tool_format or reasoning_format else None
    return Wishes(
        max_tokens=dialogue.max_tokens,
        logprobs=dialogue.logprobs,
        grammar=grammar,
        grammar_field=field,
        chat=chat,
        parser=parser,
        one_call=tool_format is not None and not dialogue.parallel_calls,
        visible_tokens=visible_tokens(tool_format, reasoning_format) if parser else frozenset(),
    )
