"""POST /tokenize and /detokenize: from a prompt to its tokens, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from penstock.api.auth.keys import Tenant
from penstock.api.models import Models, ServedModel
from penstock.api.openai.chat import read_chat
from penstock.api.openai.schema import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Message, Text, Tool
from penstock.api.pipeline.images import shown_ids
from penstock.api.pipeline.plan import check_text_length, check_token_ids, encode_prompt
from penstock.api.pipeline.request import Incoming, PromptContext, decode_body
from penstock.text.encoding import Steps
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import RequestError

if TYPE_CHECKING:
    from penstock.api.app import Services


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Either a `prompt` or `messages`. `model` is optional when the server has only one.

    `add_special_tokens` applies to a `prompt` and defaults to true. Chat templates write their own special tokens.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: Text | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Token ids, at most the model's context length. `model` is optional when the server has only one."""

    tokens: list[int]
    model: str | None = None


class TokenizeAnswer(Struct, kw_only=True, omit_defaults=True):
    """`max_model_len` is the model's context length. `token_strs` is set only with `return_token_strs`."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Struct):
    """The text of the tokens, including special tokens."""

    prompt: str


MESSAGE_BYTES = 64
"""A message is as much to read as this many bytes of a body."""

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)
_MESSAGES_ONLY = ("tools", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")


async def tokenize(services: Services, incoming: Incoming) -> TokenizeAnswer:
    """Answers POST /tokenize."""
    request = await decode_body(incoming.body, _TOKENIZE, frozenset(), turn=incoming.turn)
    model = _model(services.context.models, request.model)
    token_ids = await _encoded(model, request, services.context, incoming.tenant)
    texts = await services.context.read(incoming, _texts, model, token_ids) if request.return_token_strs else None
    return TokenizeAnswer(count=len(token_ids), max_model_len=model.info.context_length, tokens=token_ids, token_strs=texts)


async def detokenize(services: Services, incoming: Incoming) -> DetokenizeAnswer:
    """Answers POST /detokenize."""
    request = await decode_body(incoming.body, _DETOKENIZE, frozenset(), turn=incoming.turn)
    model = _model(services.context.models, request.model)
    return DetokenizeAnswer(await services.context.read(incoming, _decoded, model, request.tokens))


def _model(models: Models, name: str | None) -> ServedModel:
    if name is not None:
        return models.find(name)
    served = models.all()
    if len(served) == 1:
        return served[0]
    if not served:
        raise RequestError("no worker is ready", code="no_worker", status=503)
    known = ", ".join(f"`{model.info.name}`" for model in served)
    raise RequestError(f"`model` is required: this server has {known}", param="model", code="missing_field")


async def _encoded(model: ServedModel, request: TokenizeRequest, context: PromptContext, tenant: Tenant) -> Sequence[int]:
    if (request.prompt is None) == (request.messages is None):
        given = "neither" if request.prompt is None else "both"
        raise RequestError(f"`prompt` and `messages`: expected one of them, not {given}", param="prompt", code="missing_field")
    if request.messages is not None:
        return await _encoded_chat(model, request, request.messages, context, tenant)
    assert request.prompt is not None
    for name in _MESSAGES_ONLY:
        if getattr(request, name) is not None:
            raise RequestError(f"`{name}` needs `messages`: a `prompt` uses no chat template", param=name)
    check_text_length(model, "prompt", request.prompt)
    if request.add_special_tokens is False:
        return await context.transcripts.encoder.run(_encode_plain(model.tokenizer, request.prompt), tenant.lane)
    return await context.transcripts.encoder.encode_text(model.tokenizer, request.prompt, tenant.lane)


def _encode_plain(tokenizer: Tokenizer, text: str) -> Steps[list[int]]:
    token_ids: list[int] = []
    for piece in tokenizer.encode_part_steps(text):
        token_ids += piece
        yield
    return token_ids


async def _encoded_chat(
    model: ServedModel, request: TokenizeRequest, messages: list[Message], context: PromptContext, tenant: Tenant
) -> Sequence[int]:
    """A position of an image is the model's own token for one."""
    if request.add_special_tokens:
        message = "`add_special_tokens` is true: expected false with `messages`, because the chat template writes its own"
        raise RequestError(message, param="add_special_tokens")
    asked = ChatRequest(
        model=model.info.name,
        messages=messages,
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    chat = await context.transcripts.encoder.read(tenant.lane, len(messages) * MESSAGE_BYTES, read_chat, asked)
    return shown_ids(await encode_prompt(model, chat, tenant, context), model.tokenizer, model.info.images)


def _check_ids(model: ServedModel, token_ids: Sequence[int]) -> None:
    max_tokens = model.info.context_length
    if len(token_ids) > max_tokens:
        raise RequestError(f"`tokens` has {len(token_ids):,} tokens: expected at most {max_tokens:,}, the model's context", param="tokens")
    check_token_ids("tokens", token_ids, model.tokenizer.vocab_size)


def _decoded(model: ServedModel, token_ids: Sequence[int]) -> str:
    _check_ids(model, token_ids)
    detokenizer = model.tokenizer.detokenizer(frozenset(), False)
    return detokenizer.feed(token_ids) + detokenizer.finish()


def _texts(model: ServedModel, token_ids: Sequence[int]) -> list[str]:
    return [model.tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]
