"""From a request to the generations that answer it. All that can be refused is refused here, before any work is done."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.http.models import ServedModel
from penstock.http.schema import Common
from penstock.wire.errors import RequestError
from penstock.wire.messages import GENERATION_ID_BYTES, Sampling, Submit

MAX_CHOICES = 2048
_DEFAULT_SAMPLING = Sampling()
_SAMPLING_FIELDS = Sampling.__struct_fields__


@dataclass(frozen=True)
class Plan:
    """What to run for one request: one Submit a choice, in the order of their indexes."""

    model: ServedModel
    submits: Sequence[Submit]
    stops: Sequence[str]
    stream: bool
    include_usage: bool
    prompt_tokens: int
    response_id: str


def make_plan(
    model: ServedModel,
    request: Common,
    prompts: Sequence[tuple[str, Sequence[int]]],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: bool = False,
) -> Plan:
    """`prompts` has each prompt's field name, for the errors, and its tokens. `max_tokens` None: as many as fit."""
    n = request.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise RequestError(f"{len(prompts)} prompts × `n` {n} make more than {MAX_CHOICES} choices", param="n")
    if request.stream_options is not None and not request.stream:
        raise RequestError("`stream_options` needs `stream` to be true", param="stream_options")
    choices = [(field, tuple(token_ids), choice) for field, token_ids in prompts for choice in range(n)]
    response_id, *ids = _random_ids(len(choices) + 1)
    least, sampling = _min_tokens(request, max_tokens), _sampling(request)
    submits = [
        Submit(
            id=generation_id,
            token_ids=token_ids,
            max_tokens=_room(model, field, token_ids, max_tokens),
            seed=_seed(request.seed, choice),
            min_tokens=least,
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            sampling=sampling,
        )
        for generation_id, (field, token_ids, choice) in zip(ids, choices, strict=True)
    ]
    prompt_tokens = sum(len(token_ids) for _, token_ids in prompts)
    return Plan(model, submits, request.stops, bool(request.stream), request.include_usage, prompt_tokens, response_id.hex())


def check_text_length(model: ServedModel, field: str, text: str) -> None:
    """Refuses a text that cannot fit whatever its tokens are, without tokenizing it."""
    least = len(text) // model.tokenizer.max_token_bytes
    if least >= model.info.context_length:
        raise _too_long(model, field, f"at least {least:,}", None)


def _room(model: ServedModel, field: str, token_ids: Sequence[int], max_tokens: int | None) -> int:
    if not token_ids:
        raise RequestError(f"`{field}` has no tokens; a prompt needs at least one", param=field, code="empty_prompt")
    room = model.info.context_length - len(token_ids)
    if room <= 0 or (max_tokens is not None and max_tokens > room):
        raise _too_long(model, field, f"{len(token_ids):,}", max_tokens)
    return room if max_tokens is None else max_tokens


def _too_long(model: ServedModel, field: str, tokens: str, max_tokens: int | None) -> RequestError:
    asked = f"; with {max_tokens:,} to generate that does not fit" if max_tokens else "; that does not fit"
    message = f"`{field}` has {tokens} tokens{asked} the model's context of {model.info.context_length:,} tokens"
    return RequestError(message, param=field, code="context_length_exceeded")


def _random_ids(count: int) -> list[bytes]:
    """Unguessable ids, all drawn at once."""
    drawn = secrets.token_bytes(count * GENERATION_ID_BYTES)
    return [drawn[start : start + GENERATION_ID_BYTES] for start in range(0, len(drawn), GENERATION_ID_BYTES)]


def _seed(seed: int | None, choice: int) -> int:
    """Choice `i` of a prompt uses `seed + i`, so that choices differ and each can be had alone."""
    return random.getrandbits(63) if seed is None else (seed + choice) % 2**64


def _min_tokens(request: Common, max_tokens: int | None) -> int:
    wanted = request.min_tokens or 0
    if max_tokens is not None and wanted > max_tokens:
        raise RequestError(f"`min_tokens` is {wanted}: expected at most `max_tokens`, which is {max_tokens}", param="min_tokens")
    return wanted


def _sampling(request: Common) -> Sampling:
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(request, name)) is not None}
    return Sampling(**given) if given else _DEFAULT_SAMPLING
