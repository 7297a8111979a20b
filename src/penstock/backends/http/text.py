"""Text made tokens again, for engines that hand out text only. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import PenstockError

# Stands for itself, whatever comes after it: behind it a text is tokenized as it is in the middle of another.
BARRIER = "\u263a"
# Of what came before, so much decides how the next tokens are shown.
ANCHOR = 8


class Unwritable(PenstockError):
    """The vocabulary has no tokens for this text."""


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """The tokens that stand for a single byte, by that byte. All 256 of them, in most vocabularies."""
    pieces = {token: tokenizer.token_bytes(token) for token in tokenizer.ordinary_ids}
    return {piece[0]: token for token, piece in pieces.items() if len(piece) == 1}


class TextTokens:
    """Tokens for a text that comes in pieces: detokenized, they are that text, character for character.

    They need not be those that the engine made, nor as many. What only looks like a special token is written byte by byte, so that it is
    shown. Halves of a character that come in two pieces, as from engines that count in UTF-16, are put together.
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
        """The tokens of what was held back."""
        text, self._half = _joined(self._half), ""
        return self._write(text)

    def _write(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        for token_ids in self._candidates(text):
            if token_ids is not None and self._shown(token_ids) == text:
                self._before = (*self._before, *token_ids)[-ANCHOR:]
                return token_ids
        raise Unwritable(f"the model's vocabulary has no tokens for the text {text[:40]!r}")

    def _candidates(self, text: str) -> Iterator[tuple[int, ...] | None]:
        """Ways to write it, the most usual one first."""
        yield self._plainly(text)
        yield self._behind_another(text)
        yield self._in_bytes(text)
        if not self._before:
            # Some detokenizers take the first space of a text away.
            yield self._plainly(" " + text)
            yield self._in_bytes(" " + text)

    def _shown(self, token_ids: tuple[int, ...]) -> str:
        """What a reader sees of these tokens behind those before."""
        detokenizer = self._tokenizer.detokenizer()
        detokenizer.feed(self._before)
        shown = detokenizer.feed(token_ids)
        return shown + detokenizer.finish()

    def _plainly(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_part(text))

    def _behind_another(self, text: str) -> tuple[int, ...] | None:
        """Without the space that some tokenizers put before a text."""
        before, whole = self._tokenizer.encode_part(BARRIER), self._tokenizer.encode_part(BARRIER + text)
        return tuple(whole[len(before) :]) if whole[: len(before)] == before else None

    def _in_bytes(self, text: str) -> tuple[int, ...] | None:
        data = text.encode()
        return tuple([self._of_bytes[byte] for byte in data]) if self._of_bytes.keys() >= set(data) else None


def _joined(text: str) -> str:
    """Halves of characters that stand side by side made one; U+FFFD for those that are alone."""
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
