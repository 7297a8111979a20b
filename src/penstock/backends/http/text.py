"""The route for any server with OpenAI's completions: it answers with text only, which is tokenized here. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from penstock.backends.external.engine import Chunk, EngineRefused, EngineRequest
from penstock.backends.http.completions import Choice, CompletionEvent, CompletionReader, finish_of, read_event
from penstock.backends.http.dialects import Body, Dialect, Reader, unsupported
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import PenstockError
from penstock.wire.messages import Fault

# Never merges with the text after it, so that text is tokenized as in the middle of another.
BARRIER = "\u263a"
# How many earlier tokens decide how the next ones are shown.
ANCHOR = 8


@dataclass(frozen=True)
class TextDialect(Dialect):
    """`/v1/completions` of any server. It answers with text, which is tokenized here.

    Fields that OpenAI's API does not have are sent only if the request needs them: strict servers refuse unknown fields.
    """

    path = "/v1/completions"
    model: str
    tokenizer: Tokenizer
    of_bytes: Mapping[int, int]

    def body(self, request: EngineRequest) -> Body:
        _check_supported(request)
        sampling = request.sampling
        body: Body = {
            "model": self.model,
            "prompt": request.token_ids,
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stream": True,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        if sampling.repetition_penalty != 1.0:
            body["repetition_penalty"] = sampling.repetition_penalty
        if_wanted: Body = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "min_tokens": request.min_tokens,
            "ignore_eos": request.ignore_eos,
            "stop_token_ids": request.stop_ids,
            "logit_bias": {str(token): bias for token, bias in request.logit_bias},
            "cache_salt": request.salt,
        }
        return body | {name: value for name, value in if_wanted.items() if value}

    def reader(self, request: EngineRequest) -> Reader:
        return _TextReader(request, TextTokens(self.tokenizer, self.of_bytes), self.tokenizer.end_id)


def _check_supported(request: EngineRequest) -> None:
    for is_wanted, what in (
        (request.logprobs is not None, "logprobs"),
        (request.prompt_logprobs, "prompt logprobs"),
        (request.lark is not None, "a grammar"),
    ):
        if is_wanted:
            raise unsupported(f"{what}: it answers with text only")


class _TextReader(CompletionReader):
    def __init__(self, request: EngineRequest, tokens: TextTokens, end_id: int) -> None:
        super().__init__(request)
        self._tokens = tokens
        self._end_id = end_id

    def _decode(self, event: bytes) -> CompletionEvent:
        """Servers that count in UTF-16 may split a character and send its two halves, which strict JSON does not allow."""
        try:
            return read_event(event)
        except EngineRefused:
            # If the event has another mistake, the first error describes it better.
            with contextlib.suppress(ValueError, RecursionError):
                return msgspec.convert(json.loads(event), CompletionEvent)
            raise

    def _chunk(self, _: CompletionEvent, choice: Choice) -> Chunk:
        finish = finish_of(choice.finish_reason)
        try:
            token_ids = self._tokens.feed(choice.text or "")
            token_ids += self._tokens.finish() if finish is not None else ()
        except Unwritable as error:
            raise EngineRefused(Fault("engine_failed", str(error))) from error
        # The end token has no text.
        return Chunk((*token_ids, self._end_id) if finish == "stop" else token_ids, None, finish)


class Unwritable(PenstockError):
    """The vocabulary cannot express this text."""


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """The tokens of single bytes, by that byte. Most vocabularies have all 256."""
    pieces = {token: tokenizer.token_bytes(token) for token in tokenizer.ordinary_ids}
    return {piece[0]: token for token, piece in pieces.items() if len(piece) == 1}


class TextTokens:
    """Tokenizes a text that comes in pieces. Detokenized, the tokens give exactly that text.

    The engine may have generated other tokens, and another number of them. Text that looks like a special token is written byte by byte,
    so that it stays visible. The halves of a character that come in two pieces (engines that count in UTF-16) are joined.
    """

    def __init__(self, tokenizer: Tokenizer, of_bytes: Mapping[int, int]) -> None:
        self._tokenizer = tokenizer
        self._of_bytes = of_bytes
        self._before: tuple[int, ...] = ()
        self._half = ""

    def feed(self, text: str) -> tuple[int, ...]:
        """The tokens of the next piece. Raises Unwritable."""
        text = self._half + text
        self._half = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        return self._write(_joined(text[: len(text) - len(self._half)]))

    def finish(self) -> tuple[int, ...]:
        """The tokens of the text that was held back."""
        text, self._half = _joined(self._half), ""
        return self._write(text)

    def _write(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        for token_ids in self._candidates(text):
            if token_ids is not None and self._shown(token_ids) == text:
                self._before = (*self._before, *token_ids)[-ANCHOR:]
                return token_ids
        raise Unwritable(f"the model's vocabulary cannot express the text {text[:40]!r}")

    def _candidates(self, text: str) -> Iterator[tuple[int, ...] | None]:
        """Ways to tokenize the text, the most usual first."""
        yield self._plainly(text)
        yield self._behind_another(text)
        yield self._in_bytes(text)
        if not self._before:
            # Some detokenizers remove the first space of a text.
            yield self._plainly(" " + text)
            yield self._in_bytes(" " + text)

    def _shown(self, token_ids: tuple[int, ...]) -> str:
        """The text of these tokens after the earlier ones."""
        detokenizer = self._tokenizer.detokenizer()
        detokenizer.feed(self._before)
        shown = detokenizer.feed(token_ids)
        return shown + detokenizer.finish()

    def _plainly(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_part(text))

    def _behind_another(self, text: str) -> tuple[int, ...] | None:
        """Without the space that some tokenizers add before a text."""
        before, whole = self._tokenizer.encode_part(BARRIER), self._tokenizer.encode_part(BARRIER + text)
        return tuple(whole[len(before) :]) if whole[: len(before)] == before else None

    def _in_bytes(self, text: str) -> tuple[int, ...] | None:
        data = text.encode()
        return tuple([self._of_bytes[byte] for byte in data]) if self._of_bytes.keys() >= set(data) else None


def _joined(text: str) -> str:
    """Joins adjacent halves of characters. A single half becomes U+FFFD."""
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
