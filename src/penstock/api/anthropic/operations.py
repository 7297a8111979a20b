"""Anthropic's routes, as the API's document tells of them."""

from __future__ import annotations

from penstock.api.anthropic import answers
from penstock.api.anthropic.errors import OVERLOADED
from penstock.api.anthropic.schema import CountRequest, MessagesRequest
from penstock.api.document.operation import EXAMPLE_MODEL, HINTS, Operation

_EXAMPLE = {"model": EXAMPLE_MODEL, "messages": [{"role": "user", "content": "What is a penstock?"}]}
_ERRORS = (400, 404, 408, 413, OVERLOADED)

ANTHROPIC_OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/messages",
        tag="Anthropic",
        summary="The next message of a chat, as Anthropic's clients ask for it",
        description="With `stream` its events come as they are generated, from `message_start` to `message_stop`.",
        body=MessagesRequest,
        answer=answers.AnthropicMessage,
        event=answers.MessageEvent,
        parameters=HINTS,
        errors=(*_ERRORS, 429),
        error=answers.AnthropicError,
        example={**_EXAMPLE, "max_tokens": 64},
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        tag="Anthropic",
        summary="How many tokens the prompt of a message has",
        body=CountRequest,
        answer=answers.TokenCount,
        parameters=HINTS,
        errors=_ERRORS,
        error=answers.AnthropicError,
        example=_EXAMPLE,
    ),
)
