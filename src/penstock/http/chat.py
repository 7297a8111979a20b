"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from penstock.http.body import decode_body
from penstock.http.dialect import Envelope, Usage
from penstock.http.hints import Headers, owner, prompt_text, read_hints
from penstock.http.models import Models
from penstock.http.plan import Plan, check_text_length, make_plan
from penstock.http.schema import UNSUPPORTED_CHAT, ChatRequest, Message
from penstock.router.affinity import session_key
from penstock.text.tokenizer import ChatMessage
from penstock.text.transcript import Transcripts
from penstock.wire.errors import RequestError
from penstock.wire.messages import Delta

_DECODER = msgspec.json.Decoder(ChatRequest)


def parse_chat(body: bytes, headers: Headers, models: Models, transcripts: Transcripts) -> tuple[Plan, ChatDialect]:
    request = decode_body(body, _DECODER, UNSUPPORTED_CHAT)
    hints, client = read_hints(request, headers), owner(headers)
    model = models.find(request.model)
    for index, message in enumerate(request.messages):
        check_text_length(model, f"messages[{index}]", message.text)
    name = model.info.name
    key = None if hints.session is None else session_key(client, name, hints.session.id)
    chat = transcripts.encode_chat(key, name, model.tokenizer, [_for_template(message) for message in request.messages])
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if max_tokens == 0:
        raise RequestError("`max_tokens` is 0: expected at least 1", param="max_tokens")
    plan = make_plan(
        model,
        request,
        hints,
        client,
        [("messages", chat.token_ids)],
        max_tokens=max_tokens,
        logprobs=_wanted_logprobs(request),
        response_format=request.response_format,
        chat=chat,
    )
    return plan, ChatDialect(plan)


class ChatDialect:
    """Renders `chat.completion.chunk` and `chat.completion` objects."""

    def __init__(self, plan: Plan) -> None:
        self._tokenizer = plan.model.tokenizer
        self._envelope = Envelope("chatcmpl", "chat.completion.chunk", plan)
        self._has_role = [False] * len(plan.submits)

    def opening(self, index: int) -> str:  # noqa: ARG002
        return ""

    def logprobs(self, index: int, delta: Delta, tokens: int) -> object:  # noqa: ARG002
        if delta.logprobs is None:
            return None
        content = []
        for token_id, entry in zip(delta.token_ids[:tokens], delta.logprobs[:tokens], strict=True):
            top = [self._token(token, value) for token, value in entry.top]
            content.append({**self._token(token_id, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def event(self, index: int, text: str, logprobs: object, finish_reason: str | None, nvext: object) -> bytes:
        # The role comes with the first text: an event of its own would be a write of its own.
        if self._has_role[index]:
            content = b',"delta":{"content":' + msgspec.json.encode(text) + b"}" if text else b',"delta":{}'
        else:
            self._has_role[index] = True
            content = b',"delta":{"role":"assistant","content":' + msgspec.json.encode(text) + b"}"
        return self._envelope.event(index, content, logprobs, finish_reason, nvext)

    def usage_event(self, usage: Usage) -> bytes:
        return self._envelope.usage_event(usage)

    def body(self, choices: Sequence[tuple[str, list[object], str]], usage: Usage, nvext: object) -> bytes:
        rendered: list[dict[str, object]] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": _joined(parts),
                "finish_reason": finish_reason,
            }
            for index, (text, parts, finish_reason) in enumerate(choices)
        ]
        return self._envelope.body("chat.completion", rendered, usage, nvext)

    def _token(self, token_id: int, logprob: float) -> dict[str, object]:
        piece = self._tokenizer.token_bytes(token_id)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


def _joined(parts: list[object]) -> object:
    """Logprobs that came in parts, as if they had come at once."""
    if not parts:
        return None
    tables = [cast(dict[str, list[object]], part) for part in parts]
    return {"content": [entry for table in tables for entry in table["content"]], "refusal": None}


def _for_template(message: Message) -> ChatMessage:
    rendered = ChatMessage(role=message.role, content=prompt_text(message))
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _wanted_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    return None
