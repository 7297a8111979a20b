"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from penstock.http.body import decode_body
from penstock.http.dialect import Envelope, Usage
from penstock.http.hints import Headers, owner, read_hints
from penstock.http.models import Models, ServedModel
from penstock.http.plan import Plan, check_text_length, make_plan
from penstock.http.schema import UNSUPPORTED_COMPLETION, CompletionRequest
from penstock.text.tokenizer import Tokenizer
from penstock.text.transcript import Transcripts
from penstock.wire.errors import RequestError
from penstock.wire.messages import Delta, TokenLogprob

_DECODER = msgspec.json.Decoder(CompletionRequest)
DEFAULT_MAX_TOKENS = 16


def parse_completion(body: bytes, headers: Headers, models: Models, _: Transcripts) -> tuple[Plan, CompletionDialect]:
    request = decode_body(body, _DECODER, UNSUPPORTED_COMPLETION)
    hints = read_hints(request, headers)
    model = models.find(request.model)
    prompts = [(field, _tokens(model, field, prompt)) for field, prompt in _prompts(request.prompt)]
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if not max_tokens and not request.echo:
        raise RequestError("`max_tokens` is 0: expected at least 1 unless `echo` is true", param="max_tokens")
    echo_logprobs = bool(request.echo) and request.logprobs is not None
    plan = make_plan(
        model,
        request,
        hints,
        owner(headers),
        prompts,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=echo_logprobs,
    )
    return plan, CompletionDialect(plan, bool(request.echo))


class CompletionDialect:
    """Renders `text_completion` objects."""

    def __init__(self, plan: Plan, echo: bool) -> None:
        self._tokenizer = plan.model.tokenizer
        self._envelope = Envelope("cmpl", "text_completion", plan)
        self._echoed = [submit.token_ids for submit in plan.submits] if echo else None
        self._offsets = [0] * len(plan.submits)

    def opening(self, index: int) -> str:
        return self._tokenizer.decode(self._echoed[index]) if self._echoed is not None else ""

    def logprobs(self, index: int, delta: Delta, tokens: int) -> object:
        of_prompt = None if delta.prompt is None else delta.prompt.logprobs
        if delta.logprobs is None and of_prompt is None:
            return None
        token_ids: list[int] = []
        entries: list[TokenLogprob | None] = []
        if of_prompt is not None and self._echoed is not None:
            token_ids += self._echoed[index]
            entries += of_prompt
        token_ids += delta.token_ids[:tokens]
        entries += (delta.logprobs or ())[:tokens]
        texts = [_text(self._tokenizer, token_id) for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry and entry.logprob for entry in entries],
            "top_logprobs": [entry and {_text(self._tokenizer, token): value for token, value in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def event(self, index: int, text: str, logprobs: object, finish_reason: str | None, nvext: object) -> bytes:
        return self._envelope.event(index, b',"text":' + msgspec.json.encode(text), logprobs, finish_reason, nvext)

    def usage_event(self, usage: Usage) -> bytes:
        return self._envelope.usage_event(usage)

    def body(self, choices: Sequence[tuple[str, list[object], str]], usage: Usage, nvext: object) -> bytes:
        rendered: list[dict[str, object]] = [
            {"index": index, "text": text, "logprobs": _joined(parts), "finish_reason": finish_reason}
            for index, (text, parts, finish_reason) in enumerate(choices)
        ]
        return self._envelope.body("text_completion", rendered, usage, nvext)


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _joined(parts: list[object]) -> object:
    """Logprobs that came in parts, as if they had come at once."""
    tables = [cast(dict[str, list[object]], part) for part in parts]
    if not tables:
        return None
    return {name: [value for table in tables for value in table[name]] for name in tables[0]}


def _prompts(prompt: str | list[Any]) -> list[tuple[str, str | list[int]]]:
    """Each prompt with the name of its field. A list of numbers is one prompt; a list of strings or lists is several."""
    if isinstance(prompt, str) or (prompt and all(type(element) is int for element in prompt)):
        return [("prompt", prompt)]
    if not prompt:
        raise RequestError("`prompt` is []: expected at least one prompt", param="prompt", code="empty_prompt")
    for index, element in enumerate(prompt):
        ids = isinstance(element, list) and all(type(token) is int for token in element)
        single = type(element) is int and index == 0  # then another element is the odd one
        if not (isinstance(element, str) or ids or single) or type(element) is not type(prompt[0]):
            field = f"prompt[{index}]"
            message = f"`{field}` is {_short(element)}: expected all strings, all token ids or all lists of token ids"
            raise RequestError(message, param=field)
    return [(f"prompt[{index}]", element) for index, element in enumerate(prompt)]


def _tokens(model: ServedModel, field: str, prompt: str | list[int]) -> Sequence[int]:
    if isinstance(prompt, str):
        check_text_length(model, field, prompt)
        return model.tokenizer.encode(prompt)
    size = model.info.vocab_size
    for index, token_id in enumerate(prompt):
        if not 0 <= token_id < size:
            name = f"{field}[{index}]"
            raise RequestError(f"`{name}` is {token_id}: expected a token id from 0 to {size - 1}", param=name)
    return prompt


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:80] + "…"
