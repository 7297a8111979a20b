"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.api.models import ServedModel
from penstock.api.openai.schema import UNSUPPORTED_COMPLETION, CompletionRequest
from penstock.api.pipeline.dialect import ChoiceDelta, OpenAIDialect
from penstock.api.pipeline.hints import read_hints
from penstock.api.pipeline.plan import (
    MAX_CHOICES,
    Plan,
    check_choices,
    check_prompt_length,
    check_size,
    check_text_length,
    check_token_ids,
    make_plan,
    wanted_grammar,
)
from penstock.api.pipeline.request import Incoming, PromptContext, decode_body
from penstock.text.output import Part
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.codec import unpack_logprobs
from penstock.wire.errors import RequestError
from penstock.wire.messages import Delta, TokenLogprob

_DECODER = msgspec.json.Decoder(CompletionRequest)
DEFAULT_MAX_TOKENS = 16
MAX_PROMPT_TOKENS = 1 << 20
"""Of all prompts of one request. One prompt alone may have more, if the model's context does."""
TOKENS_AT_ONCE = 8192


async def parse_completion(incoming: Incoming, context: PromptContext) -> tuple[Plan, CompletionDialect]:
    request = await decode_body(incoming.body, _DECODER, UNSUPPORTED_COMPLETION, turn=incoming.turn)
    hints = read_hints(request, incoming.headers)
    model = context.models.find(request.model)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if not max_tokens and not request.echo:
        raise RequestError("`max_tokens` is 0: expected at least 1 unless `echo` is true", param="max_tokens")
    field, grammar = wanted_grammar(request.structured_outputs, None)
    given, candidates = await context.read(incoming, _prompts, model, request.prompt), _candidates(request)
    check_choices(len(given), candidates or request.n or 1)
    prompts = await _encoded(model, request, given, context, incoming.tenant.lane)
    plan = make_plan(
        model,
        request,
        hints,
        incoming.tenant,
        prompts,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=bool(request.echo) and request.logprobs is not None,
        candidates=candidates,
        grammar=grammar,
        grammar_field=field,
    )
    echoes = await context.read(incoming, _echoes, plan) if request.echo else None
    return plan, CompletionDialect(plan, echoes, request.logprobs is not None)


class CompletionDialect(OpenAIDialect):
    """Renders `text_completion` objects."""

    def __init__(self, plan: Plan, echoes: Sequence[str] | None, has_logprobs: bool) -> None:
        """`echoes` has the text of each prompt, if it is to be repeated."""
        super().__init__("cmpl", "text_completion", plan)
        self._echoes = echoes
        self._candidates = plan.candidates
        self._echoed = [submit.token_ids for submit in plan.submits] if echoes is not None else None
        self._has_logprobs = has_logprobs
        self._offsets = [0] * len(plan.submits)
        self._prompt_entries = [0] * len(plan.submits)

    def opening(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[index // self._candidates]

    def logprobs(self, index: int, delta: Delta, tokens: int) -> object:
        of_prompt = None if delta.prompt is None else delta.prompt.logprobs
        if not self._has_logprobs or (delta.logprobs is None and of_prompt is None):
            return None
        token_ids: list[int] = []
        entries: list[TokenLogprob | None] = []
        if of_prompt is not None and self._echoed is not None:
            # They may come in several deltas.
            entries += [entry for piece in of_prompt for entry in unpack_logprobs(piece)]
            first = self._prompt_entries[index]
            self._prompt_entries[index] = first + len(entries)
            token_ids += self._echoed[index][first : first + len(entries)]
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

    def event(self, index: int, added: ChoiceDelta) -> bytes:
        return self._framed(index, b',"text":' + msgspec.json.encode(_plain(added.parts)), added)

    def _content(self, parts: Sequence[Part]) -> dict[str, object]:
        return {"text": _plain(parts)}


def _echoes(plan: Plan) -> list[str]:
    """The text of each prompt."""
    return [_decoded(plan.model.tokenizer, submit.token_ids) for submit in plan.submits[:: plan.candidates]]


def _decoded(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    # Not `decode`: it holds the GIL until it is done.
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.feed(token_ids[start : start + TOKENS_AT_ONCE]) for start in range(0, len(token_ids), TOKENS_AT_ONCE)]
    return "".join([*pieces, detokenizer.finish()])


def _plain(parts: Sequence[Part]) -> str:
    """The text of the parts. Without a parser, all parts are text."""
    return "".join([part for part in parts if isinstance(part, str)])


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _prompts(model: ServedModel, prompt: str | list[Any]) -> list[tuple[str, str | list[int]]]:
    """Each prompt with the name of its field. A list of numbers is one prompt; a list of strings or lists is several prompts.

    What is too many or too long is refused before it is looked at.
    """
    if isinstance(prompt, str):
        check_text_length(model, "prompt", prompt)
        return [("prompt", prompt)]
    if not prompt:
        raise RequestError("`prompt` is []: expected at least one prompt", param="prompt", code="empty_prompt")
    if type(prompt[0]) is int:
        check_prompt_length(model, "prompt", prompt)
        if _are_ids(prompt):
            return [("prompt", prompt)]
    else:
        check_size("prompt", len(prompt), MAX_CHOICES, "prompts")
    for index, element in enumerate(prompt):
        field = f"prompt[{index}]"
        if isinstance(element, str):
            check_text_length(model, field, element)
        elif isinstance(element, list):
            check_prompt_length(model, field, element)
        ids = isinstance(element, list) and _are_ids(element)
        single = type(element) is int and index == 0  # then another element is the odd one
        if not (isinstance(element, str) or ids or single) or type(element) is not type(prompt[0]):
            message = f"`{field}` is {_short(element)}: expected all strings, all token ids or all lists of token ids"
            raise RequestError(message, param=field)
    return [(f"prompt[{index}]", element) for index, element in enumerate(prompt)]


def _are_ids(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int}


async def _encoded(
    model: ServedModel, request: CompletionRequest, prompts: list[tuple[str, str | list[int]]], context: PromptContext, lane: str
) -> list[tuple[str, Sequence[int]]]:
    encoder = context.transcripts.encoder
    if request.suffix is None:
        texts = [prompt for _, prompt in prompts if isinstance(prompt, str)]
        made = await encoder.encode_texts(model.tokenizer, texts, lane, model.info.context_length, MAX_PROMPT_TOKENS)
        if len(made) < len(texts):
            message = f"`prompt` has more than {MAX_PROMPT_TOKENS:,} tokens in all its prompts: expected at most that many"
            raise RequestError(message, param="prompt", code="too_long", limit="prompt_tokens")
        encoded = iter(made)
        return [(field, _checked(model, field, next(encoded) if isinstance(prompt, str) else prompt, prompt)) for field, prompt in prompts]
    if len(prompts) > 1 or not isinstance(request.prompt, str):
        raise RequestError("`suffix` needs `prompt` to be one string", param="suffix")
    check_text_length(model, "suffix", request.suffix)
    token_ids = await encoder.encode_infill(model.tokenizer, request.prompt, request.suffix, lane)
    if token_ids is None:
        message = f"`suffix` is not supported by {model.info.name}: its vocabulary has no tokens to fill in the middle; leave it out"
        raise RequestError(message, param="suffix", code="unsupported_field")
    return [("prompt", token_ids)]


def _checked(model: ServedModel, field: str, token_ids: Sequence[int], prompt: str | list[int]) -> Sequence[int]:
    if isinstance(prompt, str):
        check_prompt_length(model, field, token_ids, is_cut=True)
    else:
        check_token_ids(field, token_ids, model.info.vocab_size)
    return token_ids


def _candidates(request: CompletionRequest) -> int | None:
    n, best_of = request.n or 1, request.best_of
    if best_of is None:
        return None
    if best_of < n:
        raise RequestError(f"`best_of` is {best_of}: expected at least `n`, which is {n}", param="best_of")
    if best_of > n and request.stream:
        raise RequestError(
            f"`best_of` is {best_of} and `stream` is true: expected `best_of` equal to `n`, which is {n}, or `stream` false",
            param="best_of",
        )
    return best_of


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:80] + "…"
