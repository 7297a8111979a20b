"""From a request to what runs for it: one `Plan`. Everything that can be refused is refused here, before any work is done."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct, structs

from penstock.api.auth.keys import Tenant
from penstock.api.models import ServedModel
from penstock.api.openai.schema import Common, Marked, ResponseFormat, StructuredOutputs
from penstock.api.pipeline.images import Images, shown_ids
from penstock.api.pipeline.json_cost import is_slow, too_complex
from penstock.api.pipeline.request import PromptContext
from penstock.kv.blocks import salted_root
from penstock.media.picture import ImageRef, Picture
from penstock.router.affinity import session_key
from penstock.router.policy import Hints, PlacedMark
from penstock.text.formats.grammar import after_reasoning, tool_grammar
from penstock.text.formats.make import make_parser, opens_reasoning, visible_tokens
from penstock.text.formats.tables import DEFAULT_TOOL_FORMAT
from penstock.text.images import MARK_CHARACTERS
from penstock.text.marks import Place
from penstock.text.output import OutputParser
from penstock.text.tokenizers.tokenizer import ChatPrompt
from penstock.text.transcript import EncodedChat, Memo
from penstock.wire.errors import MessageError, RequestError, context_exceeded
from penstock.wire.images import ImageSpan
from penstock.wire.messages import GENERATION_ID_BYTES, Grammar, GrammarKind, Mark, Sampling, Submit

MAX_CHOICES = 2048
# The same as the engine's limit. Checked here, a grammar that is too large does not travel.
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_GRAMMAR_BYTES_IN_ALL = 128 * MAX_GRAMMAR_BYTES
"""A grammar is sent with each choice. All choices of one chat may have the longest."""
MAX_SCHEMA_NODES = 16_384
"""Objects and lists in the schemas of a request's tools, and in the schema of its answer."""
MAX_BIAS = 100
# What a token of a prompt takes when the answer repeats it with its logprob, and what each of its alternatives takes.
PROMPT_TOKEN_BYTES = 256
PROMPT_LOGPROB_BYTES = 48
# A shorter prompt is sent with each of its choices: its tokens take no more bytes than its name.
MIN_SHARED_TOKENS = 32

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_NO_TOKENS: frozenset[str] = frozenset()
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_DEFAULT_SAMPLING = Sampling()
_SAMPLING_FIELDS = Sampling.__struct_fields__


class ToolChoice(NamedTuple):
    """Which tools the model may or must call. With the mode `named` it must call the tool `name`."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


AUTO = ToolChoice()


class Chat(Struct, frozen=True, kw_only=True, gc=False):
    """A chat, the same for all APIs. `fields` has the name of each message in the request, for error messages.

    The model may call the prompt's tools, and `later_tools`, which messages describe, but not `removed_tools`. The text of the answer must
    follow `grammar`. Without `max_tokens` the answer may fill the context. A `max_tokens` that does not fit the context is an error; with
    `clips`, it is reduced. `marked` are the marks for the cache in its messages. `left_out` are messages that were dropped from the prompt.
    `images` are those whose marks are in the messages: `image_mark(0)` stands for the first. `seen`: see `Images`.
    """

    prompt: ChatPrompt
    fields: Sequence[str]
    max_tokens: int | None = None
    clips: bool = False
    logprobs: int | None = None
    tool_choice: ToolChoice = AUTO
    parallel_calls: bool = True
    grammar: Grammar | None = None
    grammar_field: str | None = None
    later_tools: Sequence[Mapping[str, Any]] = ()
    removed_tools: frozenset[str] = frozenset()
    marked: Sequence[Marked] = ()
    left_out: slice = slice(0)
    images: Sequence[ImageRef] = ()
    seen: dict[int, Picture | str] = {}


class Plan(Struct, frozen=True, kw_only=True, gc=False):
    """What to run for one request: one Submit per candidate, in the order of their indexes, and how their tokens become the answer.

    Of the `candidates` of each prompt, the best `n` are the choices of the answer. `grammar_field` is the request's field with the
    grammar, for the errors of workers: only a worker knows whether it can follow a grammar. `parser` makes a parser for a choice's text; it
    needs the special tokens in `visible_tokens` as text. With `one_call`, a choice ends with its first tool call. `chat` is the encoded
    prompt of a chat. `pictures` are those of its images: workers may ask for them as long as the request runs.
    """

    model: ServedModel
    request: Common
    submits: Sequence[Submit]
    response_id: str
    hints: Hints
    tenant: Tenant
    prompt_tokens: int
    n: int = 1
    candidates: int = 1
    grammar_field: str | None = None
    chat: EncodedChat | None = None
    parser: Callable[[], OutputParser | None] | None = None
    one_call: bool = False
    visible_tokens: frozenset[str] = _NO_TOKENS
    pictures: tuple[Picture, ...] = ()

    @property
    def prompt_logprob_bytes(self) -> int:
        """About how much memory the logprobs of its prompts take in an answer."""
        per_token = PROMPT_TOKEN_BYTES + (self.submits[0].logprobs or 0) * PROMPT_LOGPROB_BYTES
        return self.prompt_tokens * self.candidates * per_token

    @property
    def remembers(self) -> bool:
        """Whether the tokens of its answers are kept for the session's next turn."""
        session = self.hints.session
        return session is not None and self.chat is not None and session.action != "close" and not session.is_final

    @property
    def choice_prompts(self) -> list[Sequence[int]]:
        """The prompt of each choice, as its client sees it."""
        prompts: list[Sequence[int]] = [submit.token_ids for submit in self.submits[:: self.candidates]]
        if self.pictures:
            prompts = [shown_ids(prompt, self.model.tokenizer, self.model.info.images) for prompt in prompts]
        return [prompt for prompt in prompts for _ in range(self.n)]


async def plan_chat(
    request: Common, chat: Chat, hints: Hints, tenant: Tenant, context: PromptContext, memo: Memo | None = None, is_trial: bool = False
) -> Plan:
    """Raises RequestError that names the field. `memo` is for several tries with one chat; the session remembers nothing of a trial."""
    model = context.models.find(request.model)
    check_lengths(model, chat)
    check_schemas("tools", [*chat.prompt.tools, *chat.later_tools])
    tools = _callable_tools(chat)
    name = model.info.name
    key = None if hints.session is None or is_trial else session_key(tenant.owner, name, hints.session.id)
    prompt_field = chat.fields[-1].partition("[")[0]  # it has all messages
    check = partial(_room, model, prompt_field, max_tokens=chat.max_tokens, clips=chat.clips)
    marks = _still_there(hints.marks, chat.left_out) if hints.marks else ()
    places = _places(marks)
    pictures: tuple[Picture, ...] = ()
    if chat.images:
        chat, places, pictures = await _show_images(model, chat, places, tenant, context, hints.cache_salt)
    encoded = await _encode(model, chat, tenant, context, key, memo, check, places=list(places.values()))
    reasoning_format = model.info.reasoning_parser
    tool_format = (model.info.tool_parser or DEFAULT_TOOL_FORMAT) if tools else None
    is_inside = reasoning_format is not None and opens_reasoning(reasoning_format, encoded.ending)
    grammar, field = chat.grammar, chat.grammar_field
    if tool_format is not None and chat.tool_choice.mode in ("required", "named"):
        # A format is for the text of the answer, and there is none.
        if grammar is not None and field == "structured_outputs":
            raise RequestError(f"`tool_choice` forces a call and cannot be combined with `{field}`", param="tool_choice")
        tool_format, grammar = tool_grammar(tool_format, tools, chat.parallel_calls, reasoning_format, is_inside)
        field = "tool_choice"
    elif grammar is not None:
        # A format is for text: the model may still call. `structured_outputs` are for the whole answer.
        called = None if field == "structured_outputs" else tool_format
        grammar = after_reasoning(grammar, reasoning_format, is_inside, called, tools)
    parser = partial(make_parser, tool_format, reasoning_format, tools, is_inside) if tool_format or reasoning_format else None
    plan = make_plan(
        model,
        request,
        hints,
        tenant,
        [(prompt_field, encoded.token_ids)],
        images=encoded.images,
        marks=_lengths(marks, places, encoded),
        max_tokens=chat.max_tokens,
        clips=chat.clips,
        logprobs=chat.logprobs,
        grammar=grammar,
        grammar_field=field,
    )
    return structs.replace(
        plan,
        chat=encoded,
        pictures=pictures,
        parser=parser,
        one_call=tool_format is not None and not chat.parallel_calls,
        visible_tokens=visible_tokens(tool_format, reasoning_format) if parser else _NO_TOKENS,
    )


async def encode_prompt(
    model: ServedModel, chat: Chat, tenant: Tenant, context: PromptContext, key: str | None = None, salt: str | None = None
) -> Sequence[int]:
    """The tokens of the chat's prompt: in the session with this key, if there is one. `salt` is for the names of its images."""
    check_lengths(model, chat)
    check_schemas("tools", [*chat.prompt.tools, *chat.later_tools])
    if chat.images:
        chat, _, _ = await _show_images(model, chat, {}, tenant, context, salt)
    return (await _encode(model, chat, tenant, context, key, is_remembered=False)).token_ids


async def _show_images(
    model: ServedModel, chat: Chat, places: dict[float, Place], tenant: Tenant, context: PromptContext, salt: str | None
) -> tuple[Chat, dict[float, Place], tuple[Picture, ...]]:
    """The chat with its images read, and the places of marks for the cache then. What is cheap to check was checked before."""
    images = Images(chat.images, chat.seen)
    prompt, places, pictures = await images.show(chat.prompt, places, model, tenant, _root(tenant, salt), context)
    return structs.replace(chat, prompt=prompt), places, pictures


async def _encode(
    model: ServedModel,
    chat: Chat,
    tenant: Tenant,
    context: PromptContext,
    key: str | None,
    memo: Memo | None = None,
    check: Callable[[int], object] | None = None,
    is_remembered: bool = True,
    places: Sequence[Place] = (),
) -> EncodedChat:
    """The tokens of a chat. Raises RequestError that names the message."""
    encode, prompt = context.transcripts.encode_chat, chat.prompt
    if model.info.images is not None:
        prompt = structs.replace(prompt, image_placeholder=model.info.images.placeholder)
    try:
        return await encode(key, model.info.name, model.tokenizer, prompt, tenant.lane, memo, check, is_remembered, places)
    except MessageError as error:
        raise error.named(chat.fields[error.place]) from error


def make_plan(
    model: ServedModel,
    request: Common,
    hints: Hints,
    tenant: Tenant,
    prompts: Sequence[tuple[str, Sequence[int]]],
    *,
    max_tokens: int | None,
    clips: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: bool = False,
    candidates: int | None = None,
    grammar: Grammar | None = None,
    grammar_field: str | None = None,
    marks: Sequence[Mark] | None = None,
    images: tuple[ImageSpan, ...] = (),
) -> Plan:
    """`prompts` holds the field name of each prompt, for the errors, and its tokens. `images` are those of the one prompt. `marks`: what is
    kept of the prompt; without them the hints' marks are for all of each prompt. Raises RequestError that names the field."""
    n = request.n or 1
    candidates = candidates or n
    _check_common(model, request)
    _check_grammar_size(grammar_field, grammar, len(prompts) * candidates)
    # The choices of a prompt share one tuple: its block names are computed once.
    shared = [
        (tuple(token_ids), _room(model, field, len(token_ids), max_tokens, clips), _furthest(hints, token_ids, marks))
        for field, token_ids in prompts
    ]
    choices = [(token_ids, room, kept, choice) for token_ids, room, kept in shared for choice in range(candidates)]
    response_id, *ids = _random_ids(len(choices) + 1)
    names = _prompt_names(choices, ids, candidates)
    common: dict[str, Any] = {  # to all generations
        "min_tokens": _min_tokens(request, max_tokens),
        "ignore_eos": bool(request.ignore_eos),
        # Candidates are compared by their logprobs.
        "logprobs": 0 if logprobs is None and candidates > n else logprobs,
        "prompt_logprobs": prompt_logprobs,
        "sampling": _sampling(request),
        "stop_ids": tuple(request.stop_token_ids or ()),
        "logit_bias": _logit_bias(model, request.logit_bias or {}),
        "grammar": grammar,
        "images": images,
        "is_seed_drawn": request.seed is None,
        **_of_tenant(tenant, hints),
    }
    return Plan(
        model=model,
        request=request,
        submits=[
            Submit(generation_id, token_ids, room, _seed(request.seed, choice), prompt=name, marks=kept, **common)
            for generation_id, name, (token_ids, room, kept, choice) in zip(ids, names, choices, strict=True)
        ],
        response_id=response_id.hex(),
        hints=hints,
        tenant=tenant,
        prompt_tokens=sum([len(token_ids) for _, token_ids in prompts]),
        n=n,
        candidates=candidates,
        grammar_field=grammar_field,
    )


def _check_common(model: ServedModel, request: Common) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("`stream_options` needs `stream` to be true", param="stream_options")
    check_token_ids("stop_token_ids", request.stop_token_ids or (), model.info.vocab_size)


def _of_tenant(tenant: Tenant, hints: Hints) -> dict[str, Any]:
    """What a generation may use, and with whom it shares KV."""
    return {
        "retention_seconds": hints.retention_seconds,
        "priority": _priority(hints, tenant),
        "lane": tenant.lane,
        "weight": tenant.weight,
        "root": _root(tenant, hints.cache_salt),
    }


def _root(tenant: Tenant, salt: str | None) -> bytes:
    """What shares KV, and the names of images."""
    return tenant.root if salt is None else salted_root(tenant.root, salt)


def _still_there(marks: Sequence[PlacedMark], left_out: slice) -> Sequence[PlacedMark]:
    """The marks in a prompt without these messages. The marks on them are gone."""
    dropped = range(left_out.start or 0, left_out.stop)
    if not dropped:
        return marks
    return [
        mark if mark.message is None or mark.message < dropped.start else structs.replace(mark, message=mark.message - len(dropped))
        for mark in marks
        if mark.message not in dropped
    ]


def _places(marks: Sequence[PlacedMark]) -> dict[float, Place]:
    """The furthest place for each time: it includes the others."""
    found: dict[float, Place] = {}
    for mark in marks:
        if mark.message is not None:
            found[mark.seconds] = max(Place(mark.message, mark.characters), found.get(mark.seconds, Place(0, 0)))
    return found


def _lengths(marks: Sequence[PlacedMark], places: Iterable[float], encoded: EncodedChat) -> list[Mark]:
    """How many tokens are kept for each time."""
    found = [Mark(tokens, seconds) for seconds, tokens in zip(places, encoded.marks, strict=True)]
    return [*found, *(Mark(len(encoded.token_ids), mark.seconds) for mark in marks if mark.message is None)]


def _furthest(hints: Hints, token_ids: Sequence[int], marks: Sequence[Mark] | None) -> tuple[Mark, ...]:
    """One mark for each time, the longest first: the furthest of those with this time."""
    if not hints.marks:
        return ()
    found: dict[float, int] = {}
    for mark in marks if marks is not None else [Mark(len(token_ids), mark.seconds) for mark in hints.marks]:
        found[mark.seconds] = max(mark.tokens, found.get(mark.seconds, 0))
    return tuple([Mark(found[seconds], seconds) for seconds in sorted(found, reverse=True) if found[seconds]])


def check_size(field: str, size: int, limit: int, what: str) -> None:
    """Raises RequestError for a field with more elements than its limit."""
    if size > limit:
        message = f"`{field}` has {size:,} {what}: expected at most {limit:,}"
        raise RequestError(message, param=field, code="too_long", limit=re.sub(r"\[.*?\]", "", field))


def check_schemas(field: str, schemas: Sequence[Any]) -> None:
    """Raises RequestError for schemas with too many objects and lists, all together."""
    nodes = 0
    waiting = list(schemas)
    while waiting:
        node = waiting.pop()
        nodes += 1
        if nodes > MAX_SCHEMA_NODES:
            message = f"`{field}` has more than {MAX_SCHEMA_NODES:,} objects and lists: expected at most that many in all schemas"
            raise RequestError(message, param=field, code="too_long", limit="schema_nodes")
        values = node.values() if isinstance(node, dict) else node
        waiting += [value for value in values if isinstance(value, (dict, list))]


def check_choices(prompts: int, candidates: int) -> None:
    if prompts * candidates > MAX_CHOICES:
        message = f"{prompts} prompts × `n` {candidates} make more than {MAX_CHOICES} choices"
        raise RequestError(message, param="n", limit="choices")


def check_lengths(model: ServedModel, chat: Chat) -> None:
    """Refuses a chat with a message that cannot fit."""
    # What an image takes is known when it is read. Its mark is no text.
    marks = len(chat.images) * MARK_CHARACTERS
    for field, message in zip(chat.fields, chat.prompt.messages, strict=True):
        _check_characters(model, field, len(message["content"]) - marks)


def check_text_length(model: ServedModel, field: str, text: str) -> None:
    """Refuses a text that cannot fit, whatever its tokens are, without tokenizing it."""
    _check_characters(model, field, len(text))


def _check_characters(model: ServedModel, field: str, characters: int) -> None:
    least = characters // model.tokenizer.max_token_bytes
    if least >= model.info.context_length:
        raise _too_long(model, field, least, is_cut=True)


def check_prompt_length(model: ServedModel, field: str, token_ids: Sequence[int], is_cut: bool = False) -> None:
    """Refuses more tokens than the context has, without looking at them. `is_cut`: there may be even more."""
    if len(token_ids) >= model.info.context_length:
        raise _too_long(model, field, len(token_ids), is_cut=is_cut)


def described_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates expect it."""
    fields = {"name": name, "description": description or "", "parameters": NO_PARAMETERS if parameters is None else parameters}
    return {"type": "function", "function": fields}


def check_names(names: Sequence[str], field: str) -> None:
    """Raises RequestError when two tools have the same name. `field` is where a tool has its name, with `{}` for the tool's index."""
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            param = field.format(index)
            raise RequestError(f"`{param}` is {name!r}: another tool has that name already", param=param)
        seen.add(name)


def _callable_tools(chat: Chat) -> dict[str, Mapping[str, Any]]:
    """The tools that may be called: the schema of the arguments, by the tool's name."""
    functions = [tool["function"] for tool in (*chat.prompt.tools, *chat.later_tools)]
    tools = {each["name"]: each["parameters"] or NO_PARAMETERS for each in functions if each["name"] not in chat.removed_tools}
    choice = chat.tool_choice
    if choice.mode == "none":
        return {}
    if choice.mode == "required" and not tools:
        raise RequestError("`tool_choice` is 'required', but there are no `tools`", param="tool_choice")
    if choice.mode == "named":
        if choice.name is None or choice.name not in tools:
            known = ", ".join(f"`{name}`" for name in tools) or "none"
            raise RequestError(f"`tool_choice` names {choice.name!r}: the tools are {known}", param="tool_choice")
        return {choice.name: tools[choice.name]}
    return tools


def _room(model: ServedModel, field: str, tokens: int, max_tokens: int | None, clips: bool) -> int:
    """The most tokens that the answer may have."""
    if not tokens:
        raise RequestError(f"`{field}` has no tokens; a prompt needs at least one", param=field, code="empty_prompt")
    room = model.info.context_length - tokens
    wanted = None if clips else max_tokens
    if room <= 0 or (wanted is not None and wanted > room):
        raise _too_long(model, field, tokens, wanted or 0)
    return room if max_tokens is None else min(max_tokens, room)


def _too_long(model: ServedModel, field: str, tokens: int, max_tokens: int = 0, *, is_cut: bool = False) -> RequestError:
    message = context_exceeded(model.info.context_length, field.partition("[")[0], tokens, max_tokens, is_cut=is_cut)
    return RequestError(message, param=field, code="context_length_exceeded", limit="context_length")


def _random_ids(count: int) -> list[bytes]:
    """Ids that cannot be guessed, drawn in one call."""
    drawn = secrets.token_bytes(count * GENERATION_ID_BYTES)
    return [drawn[start : start + GENERATION_ID_BYTES] for start in range(0, len(drawn), GENERATION_ID_BYTES)]


def _priority(hints: Hints, tenant: Tenant) -> int:
    """What the client claims, at most what its key allows. Lowered, not refused: some clients send one with every request."""
    most = tenant.quota.limits.max_priority
    return hints.priority if most is None else min(hints.priority, most)


def _prompt_names(
    choices: Sequence[tuple[Sequence[int], int, tuple[Mark, ...], int]], ids: Sequence[bytes], candidates: int
) -> list[bytes]:
    """The name of each choice's prompt: the id of its first choice. Empty for a prompt that is sent with each of its choices."""
    return [
        ids[index - choice] if candidates > 1 and len(token_ids) >= MIN_SHARED_TOKENS else b""
        for index, (token_ids, _, _, choice) in enumerate(choices)
    ]


def _seed(seed: int | None, choice: int) -> int:
    """Choice `i` of a prompt uses `seed + i`: choices differ, and each can be asked for alone."""
    return random.getrandbits(63) if seed is None else (seed + choice) % 2**64


def _min_tokens(request: Common, max_tokens: int | None) -> int:
    wanted = request.min_tokens or 0
    if max_tokens is not None and wanted > max_tokens:
        raise RequestError(f"`min_tokens` is {wanted}: expected at most `max_tokens`, which is {max_tokens}", param="min_tokens")
    return wanted


def _sampling(request: Common) -> Sampling:
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(request, name)) is not None}
    return Sampling(**given) if given else _DEFAULT_SAMPLING


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError for a token that the model does not have."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            name = f"{field}[{index}]"
            raise RequestError(f"`{name}` is {token_id}: expected a token id from 0 to {vocab_size - 1}", param=name)


def _logit_bias(model: ServedModel, biases: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    size = model.info.vocab_size
    checked: list[tuple[int, float]] = []
    for key, bias in biases.items():
        name = f"logit_bias.{key[:80]}"
        if not _TOKEN_ID.fullmatch(key) or int(key) >= size:
            raise RequestError(f"`{name}`: expected a token id from 0 to {size - 1}", param=name)
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            message = f"`{name}` is {msgspec.json.encode(bias)[:80].decode(errors='replace')}: expected a number from -100 to 100"
            raise RequestError(message, param=name)
        checked.append((int(key), float(bias)))
    return tuple(checked)


def wanted_grammar(structured: StructuredOutputs | None, response_format: ResponseFormat | None) -> tuple[str | None, Grammar | None]:
    """The grammar that a request asks for, and the field that has it."""
    formatted = None if response_format is None else _formatted(response_format)
    if structured is not None and formatted is not None:
        message = f"`structured_outputs` and `response_format` of type {formatted.kind} cannot be combined"
        raise RequestError(message, param="structured_outputs")
    grammar = formatted if structured is None else _structured(structured)
    if grammar is None:
        return None, None
    return "response_format" if structured is None else "structured_outputs", grammar


def _check_grammar_size(field: str | None, grammar: Grammar | None, choices: int) -> None:
    size = 0 if grammar is None else len(grammar.source.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise _too_large_grammar(field)
    if size * choices > MAX_GRAMMAR_BYTES_IN_ALL:
        message = f"`{field}` has {size:,} bytes for each of {choices:,} choices: expected at most {MAX_GRAMMAR_BYTES_IN_ALL:,} for all"
        raise RequestError(message, param=field, code="grammar_too_large", limit="grammar_bytes")


def _too_large_grammar(field: str | None) -> RequestError:
    return RequestError(f"`{field}` is over the limit of {MAX_GRAMMAR_BYTES:,} bytes", param=field, code="grammar_too_large")


def _formatted(response_format: ResponseFormat) -> Grammar | None:
    if (response_format.type == "json_schema") != (response_format.json_schema is not None):
        message = "`response_format.json_schema` is required with `type` json_schema, and not allowed with another type"
        raise RequestError(message, param="response_format.json_schema")
    if response_format.json_schema is not None:
        return schema_grammar("response_format.json_schema.schema", response_format.json_schema.schema)
    return None if response_format.type == "text" else Grammar("json_object")


def _structured(structured: StructuredOutputs) -> Grammar:
    sources: dict[GrammarKind, str | None] = {
        "json_schema": None if structured.json is None else _schema_source(structured.json),
        "json_object": "" if structured.json_object else None,
        "regex": structured.regex,
        "choice": None if structured.choice is None else _as_json(structured.choice),
        "lark": structured.grammar,
    }
    given = [Grammar(kind, source) for kind, source in sources.items() if source is not None]
    if len(given) != 1:
        message = f"`structured_outputs` has {len(given)} members: expected exactly one of {', '.join(StructuredOutputs.__struct_fields__)}"
        raise RequestError(message, param="structured_outputs")
    return given[0]


def schema_grammar(field: str, schema: dict[str, Any]) -> Grammar:
    """The grammar of a schema. Raises RequestError when it has too many nodes."""
    check_schemas(field, [schema])
    return Grammar("json_schema", _as_json(schema))


def _schema_source(schema: dict[str, Any] | str) -> str:
    name = "structured_outputs.json"
    if not isinstance(schema, str):
        return schema_grammar(name, schema).source
    if len(schema) > MAX_GRAMMAR_BYTES:
        raise _too_large_grammar(name)
    if is_slow(schema):
        raise too_complex(f"`{name}`")
    try:
        content = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"`{name}` is a string that is not valid JSON: {error}", param=name) from error
    if not isinstance(content, dict):
        raise RequestError(f"`{name}` is a string of JSON that is not an object", param=name)
    return schema


def _as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
