"""A model's own tokenizer and chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import tokenizers

from penstock.text.detokenizer import ByteDetokenizer, ByteTables, Detokenizer, StepDetokenizer
from penstock.text.images import break_all
from penstock.text.template import ChatTemplates
from penstock.text.tokenizers.cuts import SLICE, any_of, by_first_letter, can_slice, separators, slices
from penstock.text.tokenizers.tokenizer import DEFAULT_TEMPLATE, Answer, ChatPrompt
from penstock.text.tokenizers.vocabulary import byte_pieces, find_infill_style, is_byte_level, is_sentence_piece, lost_bytes
from penstock.wire.errors import ConfigError

PROBE = "water"

# A character whose token does not depend on what follows.
BARRIER = "\u263a"


def read_definition(definition: str) -> tokenizers.Tokenizer:
    """From the text of a `tokenizer.json`. Raises ConfigError when the library cannot read it."""
    try:
        return tokenizers.Tokenizer.from_str(definition)
    # The library raises nothing more specific.
    except Exception as error:
        raise ConfigError(f"tokenizer.json cannot be read: {error}") from error


class ModelTokenizer:
    """Tokenizes with the `tokenizers` library and renders chats with the model's templates.

    Templates may use `named_tokens` by name; `eos_token` must be one of them. `size` is the size of the model's vocabulary, if known: ids
    beyond the tokenizer's own are holes.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str],
        template: str | Mapping[str, str] | None = None,
        size: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._named_tokens = named_tokens
        sources = {DEFAULT_TEMPLATE: template} if isinstance(template, str) else template or {}
        self._templates = ChatTemplates(sources, named_tokens)
        self.chat_template = self._templates.source
        self.renders_tools = self._templates.renders_tools
        self.template_losses: Sequence[str] = self._templates.losses
        definition = tokenizer.to_str()
        self.definition: str | None = definition
        described = json.loads(definition)
        decoder = described["decoder"]
        self._is_byte_level = is_byte_level(decoder)
        self._is_sentence_piece = is_sentence_piece(decoder)
        self._strips = self._is_sentence_piece and any(part["type"] == "Strip" for part in decoder["decoders"])
        added = tokenizer.get_added_tokens_decoder()
        special = {description.content: token for token, description in added.items() if description.special}
        self._special = frozenset(special.values())
        self._special_texts = any_of(special)
        # With a fixed length, or with special tokens read as text, a text cannot be cut.
        whole_only = tokenizer.truncation is not None or tokenizer.padding is not None or tokenizer.encode_special_tokens
        self._separators = () if whole_only else separators(added.values())
        self._cuts = by_first_letter(self._separators)
        self._lost_bytes = lost_bytes(described)
        self.vocab_size = max(size, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)
        self._pieces = byte_pieces(tokenizer, self.vocab_size, self._is_byte_level)
        self._tables = ByteTables(self._pieces, special)
        self.ordinary_ids: Sequence[int] = [index for index, piece in enumerate(self._tables.plain) if piece]
        self.end_id = self._find_end()
        self.max_token_bytes = max(map(len, self._pieces))
        self._can_slice = not whole_only and can_slice(described, self.encode_part)
        self._leading, self._trailing = self._find_around()
        self._infill = find_infill_style(tokenizer.token_to_id)

    def encode(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=True)

    def render_chat(self, prompt: ChatPrompt) -> str:
        rendered = self._templates.render(prompt)
        if not prompt.image_placeholder:
            return rendered
        # These are no images: images are marks by now.
        literals = self._special_texts.findall(prompt.image_placeholder)
        return break_all(rendered, any_of(literals)) if any(literal in rendered for literal in literals) else rendered

    def parts(self, rendered: str) -> list[str]:
        # A separator at the very start does not count.
        edges = sorted([found.start() for pattern in self._cuts for found in pattern.finditer(rendered, 1)])
        return [rendered[start:stop] for start, stop in pairwise([0, *edges, len(rendered)])]

    def begins_part(self, rendered: str, position: int) -> bool:
        return rendered.startswith(self._separators, position)

    def encode_part(self, part: str) -> list[int]:
        return self._encode(part, add_special_tokens=False)

    def encode_steps(self, text: str) -> Iterator[Sequence[int]]:
        if not self._can_slice or len(text) <= SLICE:
            yield self.encode(text)
            return
        yield self._leading
        yield from map(self.encode_part, slices(text))
        yield self._trailing

    def encode_part_steps(self, part: str) -> Iterator[Sequence[int]]:
        return map(self.encode_part, slices(part) if self._can_slice else (part,))

    def encode_infill(self, prefix: str, suffix: str) -> list[int] | None:
        if self._infill is None:
            return None
        return [*self._leading, *self._infill.join(self.encode_part(prefix), self._encode_bare(suffix))]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Not `encode`: it holds the GIL all the time, and computes offsets that nobody needs.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _encode_bare(self, text: str) -> list[int]:
        """The tokens without the space that SentencePiece puts before a text."""
        if not self._is_sentence_piece:
            return self.encode_part(text)
        before, whole = self.encode_part(BARRIER), self.encode_part(BARRIER + text)
        return whole[len(before) :] if whole[: len(before)] == before else self.encode_part(text)

    def read_answer(self, before: str, token_ids: Sequence[int]) -> Answer | None:
        if not self._separators:
            return None
        if token_ids and token_ids[-1] in self._special:
            token_ids = token_ids[:-1]
        try:
            text = b"".join([self._pieces[token_id] for token_id in token_ids]).decode()
        except UnicodeDecodeError:
            return None
        # A tokenizer that adds a space before a part adds one here, too.
        for candidate in dict.fromkeys((text, text.removeprefix(" "))):
            if self._is_answer(before, candidate, token_ids):
                return Answer(candidate, token_ids)
        return None

    def _is_answer(self, before: str, text: str, token_ids: Sequence[int]) -> bool:
        if any(found.end() > len(before) for found in self._special_texts.finditer(before + text)):
            return False
        if self._lost_bytes is not None:
            data = text.encode()
            return len(data.translate(None, self._lost_bytes)) == len(data)
        if not (self._is_byte_level or self._is_sentence_piece):
            return False
        generated = [*self.encode_part(before), *token_ids]
        return self._joined(generated) == self._joined(self.encode_part(before + text))

    def _joined(self, token_ids: Sequence[int]) -> bytes:
        return b"".join([self._tables.plain[token_id] for token_id in token_ids])

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def detokenizer(self, visible: frozenset[str] = frozenset(), skip_special_tokens: bool = True) -> Detokenizer:
        if self._is_byte_level or self._is_sentence_piece:
            return ByteDetokenizer(self._tables.find(visible, skip_special_tokens), self._strips)
        return StepDetokenizer(self.decode, self._tables.shown(visible, skip_special_tokens))

    def _find_around(self) -> tuple[Sequence[int], Sequence[int]]:
        """The tokens that `encode` puts before and after those of a text."""
        whole, bare = self.encode(PROBE), self.encode_part(PROBE)
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        self._can_slice = False
        return (), ()

    def _find_end(self) -> int:
        token = self._named_tokens.get("eos_token")
        found = None if token is None else self._tokenizer.token_to_id(token)
        if found is None:
            raise ConfigError(f"the tokenizer's eos_token is {token!r}: expected a token of the vocabulary")
        return int(found)
