"""The tokens of each session: a turn tokenizes only what is new, and answers keep the tokens that the model generated."""

from __future__ import annotations

import asyncio
import struct
import sys
import weakref
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from msgspec import Struct

from penstock.text.encoding import SHORT, Encoder, Steps, at_once
from penstock.text.images import BREAK, EDGE, cut_at_marks, encode_image, marked_name
from penstock.text.marks import Place, positions, tokens_before, with_marks
from penstock.text.tokenizers.tokenizer import ChatPrompt, Tokenizer
from penstock.wire.errors import RequestError
from penstock.wire.images import ImageLayout, ImageSpan

MAX_BRANCHES = 8
"""Transcripts kept per session that differ in their ends, from overlapping turns or an edited history."""

MAX_REMEMBERED_AT_ONCE = 512
"""Parts that are added to a session in one go: 2 ms."""

MAX_FOUND_AT_ONCE = 2048

TOKEN_BYTES, IMAGE_TOKEN_BYTES = 4, 8

ENDING = 256
"""How many characters of the end of the rendered text are returned with its tokens."""

# Bytes of tokens unpacked in one step: about 1 ms. BYTES_UNPACKED of them cost as much as tokenizing one character.
STEP_BYTES = 1 << 18
BYTES_UNPACKED = 128

# Upper bounds for the objects: a part with its list and its place among the leaves; a session with its place among the sessions.
PART_BYTES = 400
SESSION_BYTES = 1000


Memo = dict[str, bytes]
"""The packed tokens of parts, for several tries with one chat."""


class _Part:
    """A piece of rendered text that is tokenized on its own, with its packed tokens. Its children are the known pieces after it."""

    __slots__ = ("children", "packed", "parent", "size", "text")

    def __init__(self, text: str, packed: bytes, parent: _Part | None) -> None:
        self.text = text
        self.packed = packed
        self.parent = parent
        self.children: list[_Part] = []
        self.size = PART_BYTES + sys.getsizeof(text) + sys.getsizeof(packed)


class _Session:
    """A tree of parts: transcripts with the same beginning share parts. Only the latest leaves are kept."""

    def __init__(self, key: str, model: str, tokenizer: Tokenizer, lane: str) -> None:
        self.model = model
        self.lane = lane
        self.tokenizer = weakref.ref(tokenizer)
        self.root = _Part("", b"", None)
        self.leaves: dict[_Part, None] = {}
        """The least recently used first."""
        self.size = SESSION_BYTES + sys.getsizeof(key) + sys.getsizeof(model)

    async def find(self, tokenizer: Tokenizer, text: str) -> list[_Part]:
        """The known parts at the start of this text. The text's own last part is never among them.

        Does not suspend for a few parts. Parts may be removed while others go on; they still have their text and tokens.
        """
        path: list[_Part] = []
        part = self.root
        position = 0
        while (following := _next(tokenizer, part, text, position)) is not None:
            path.append(following)
            part = following
            position += len(part.text)
            if not len(path) % MAX_FOUND_AT_ONCE:
                await asyncio.sleep(0)
        if path and path[-1] in self.leaves:
            self.leaves[path[-1]] = self.leaves.pop(path[-1])
        return path

    def put(self, parent: _Part, text: str, packed: bytes, *, replaces: bool) -> _Part:
        """The child of `parent` with this text. An existing one keeps its tokens, unless this `replaces` them."""
        for part in parent.children:
            if part.text == text:
                if replaces:
                    growth = sys.getsizeof(packed) - sys.getsizeof(part.packed)
                    part.packed = packed
                    part.size += growth
                    self.size += growth
                return part
        part = _Part(text, packed, parent)
        parent.children.append(part)
        self.size += part.size
        self.leaves.pop(parent, None)
        self.leaves[part] = None
        if len(self.leaves) > MAX_BRANCHES:
            self._remove(next(iter(self.leaves)))
        return part

    def holds(self, part: _Part) -> bool:
        return part is self.root or part.parent is not None

    def clear(self) -> None:
        """Breaks the reference cycles, so that the memory is freed at once."""
        while self.leaves:
            self._remove(next(iter(self.leaves)))

    def _remove(self, leaf: _Part) -> None:
        """Removes a leaf, and the parts before it that lead nowhere else."""
        del self.leaves[leaf]
        part = leaf
        while not part.children and (parent := part.parent) is not None:
            parent.children.remove(part)
            part.parent = None
            self.size -= part.size
            part = parent


def _next(tokenizer: Tokenizer, part: _Part, text: str, position: int) -> _Part | None:
    for child in part.children:
        if text.startswith(child.text, position) and _begins_part(tokenizer, text, position + len(child.text)):
            return child
    return None


def _begins_part(tokenizer: Tokenizer, text: str, position: int) -> bool:
    """An image is a part of its own."""
    if tokenizer.begins_part(text, position):
        return True
    return position < len(text) and EDGE in text[position - 1 : position + 1]


@dataclass(frozen=True, slots=True)
class _Turn:
    """Where a prompt ends in its session: after `end` comes its last part, which the answer continues."""

    key: str
    session: _Session
    tokenizer: Tokenizer
    end: _Part
    last: str
    last_packed: bytes


class EncodedChat(Struct, frozen=True, gc=False):
    """A chat as tokens. `reused_tokens` of them were known, `ending` is the end of its text, `turn` is for `Transcripts.record`. `marks`
    has the number of tokens before each place that was asked for. `images` are those in the chat, in their order."""

    token_ids: tuple[int, ...]
    reused_tokens: int = 0
    turn: _Turn | None = None
    ending: str = ""
    marks: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()


class _Piece(NamedTuple):
    """A part and its packed tokens. An image is one, with its mark as the text and with ids of eight bytes."""

    text: str
    packed: bytes

    @property
    def is_image(self) -> bool:
        return self.text.startswith(EDGE)

    @property
    def tokens(self) -> int:
        return len(self.packed) // (IMAGE_TOKEN_BYTES if self.is_image else TOKEN_BYTES)


class Transcripts:
    """The transcripts of many sessions. After every call they take at most `max_bytes`: the tenant with the most loses its least recently
    used sessions.

    `encode_chat` returns the tokens that the tokenizer makes of the rendered chat, except for recorded answers: those keep the tokens that
    were generated, as long as the chat contains exactly their text. Both decode to the same text. Everything else that is remembered only
    saves time. For one event loop: `encoder` tokenizes long texts in threads, which never touch the transcripts. Calls may overlap, even
    for one session.
    """

    def __init__(self, max_bytes: int, encoder: Encoder | None = None) -> None:
        self._max_bytes = max_bytes
        self.encoder = Encoder() if encoder is None else encoder
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._bytes_of: Counter[str] = Counter()  # by lane
        self.bytes = 0
        """The size of what is remembered."""
        self.tokens_reused = 0
        self.tokens_encoded = 0

    def __len__(self) -> int:
        return len(self._sessions)

    async def encode_chat(
        self,
        key: str | None,
        model: str,
        tokenizer: Tokenizer,
        prompt: ChatPrompt,
        lane: str = "",
        memo: Memo | None = None,
        check: Callable[[int], object] | None = None,
        is_remembered: bool = True,
        places: Sequence[Place] = (),
    ) -> EncodedChat:
        """The tokens of a chat. `lane` is the tenant whose chat it is. Without a key, nothing is looked up or remembered. Without
        `is_remembered`, the session stays as it is.

        Parts in the memo are not tokenized again; new parts are added to it. `check` gets the number of tokens before they are made into a
        tuple, which takes ten times the memory. If it raises, the error passes through and nothing is remembered.

        Raises RequestError as the tokenizer does. Does not suspend when there is little to do.
        """
        text = await self.encoder.render_chat(tokenizer, prompt, lane)
        marks = await self._find_marks(tokenizer, prompt, text, places, lane) if places else ()
        if key is None and len(text) <= SHORT and not marks and not prompt.images and BREAK not in text:
            made = tuple([token_id for part in tokenizer.parts(text) for token_id in tokenizer.encode_part(part)])
            self.tokens_encoded += len(made)
            return EncodedChat(made, ending=text[-ENDING:])
        session = None
        if key is not None:
            session = self._open(key, model, tokenizer, lane) if is_remembered else self._find(key, model, tokenizer)
        path = [] if session is None else await session.find(tokenizer, text)
        known = [_Piece(part.text, part.packed) for part in path]
        rest = text[sum(len(piece.text) for piece in known) :]
        reused = _count(known, prompt.images)
        steps = _encode(tokenizer, known, rest, memo, check, prompt.images)
        positions = sum([layout.positions for layout in prompt.images.values()])
        is_short = len(rest) + positions + reused * TOKEN_BYTES // BYTES_UNPACKED <= SHORT
        pieces, token_ids, encoded = at_once(steps) if is_short else await self.encoder.run(steps, lane)
        self.tokens_reused += len(token_ids) - encoded
        self.tokens_encoded += encoded
        turn = None
        # The session may have been forgotten or evicted meanwhile.
        if is_remembered and key is not None and session is not None and self._sessions.get(key) is session:
            end = await self._remember(key, session, path, known, pieces[:-1])
            turn = None if end is None else _Turn(key, session, tokenizer, end, *pieces[-1])
        counts = await self.encoder.read(lane, len(text), _counts, tokenizer, (*known, *pieces), marks) if marks else ()
        spans = _spans((*known, *pieces), prompt.images) if prompt.images else ()
        return EncodedChat(token_ids, reused, turn, text[-ENDING:], counts, spans)

    async def _find_marks(self, tokenizer: Tokenizer, prompt: ChatPrompt, text: str, places: Sequence[Place], lane: str) -> Sequence[int]:
        """Where the places are in the rendered text."""
        try:
            marked = await self.encoder.render_chat(tokenizer, with_marks(prompt, places), lane)
        except RequestError:
            # The template reads its messages too closely. Nothing is certain.
            marked = ""
        return await self.encoder.read(lane, len(text), positions, text, marked, len(prompt.messages), places)

    def record(self, prompt: EncodedChat, token_ids: Sequence[int]) -> None:
        """Records an answer: the tokens generated after this prompt, with or without the end token. A prompt may have several answers.

        Does nothing if the prompt is no longer remembered, or if the tokens cannot stand for text in a chat.
        """
        turn = prompt.turn
        if turn is None or self._sessions.get(turn.key) is not turn.session or not turn.session.holds(turn.end):
            return
        answer = turn.tokenizer.read_answer(turn.last.replace(BREAK, ""), token_ids)
        if answer is None or not turn.last + answer.text:
            return
        size = turn.session.size
        self._sessions.move_to_end(turn.key)
        turn.session.put(turn.end, turn.last + answer.text, turn.last_packed + _pack(answer.token_ids, turn.last), replaces=True)
        self._settle(turn.session, turn.session.size - size)

    def forget(self, key: str) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._count(session.lane, -session.size)
            session.clear()

    def check_integrity(self) -> None:
        """Asserts that every part is counted, knows its parent, and leads to a leaf."""
        assert self.bytes == sum(session.size for session in self._sessions.values()) <= self._max_bytes
        assert self.bytes == sum(self._bytes_of.values())
        assert self._bytes_of.keys() == {session.lane for session in self._sessions.values()}
        for key, session in self._sessions.items():
            parts = [session.root]
            for part in parts:
                assert all(child.parent is part for child in part.children)
                assert len({child.text for child in part.children}) == len(part.children)
                parts += part.children
            assert {part for part in parts[1:] if not part.children} == session.leaves.keys()
            assert len(session.leaves) <= MAX_BRANCHES
            base = SESSION_BYTES + sys.getsizeof(key) + sys.getsizeof(session.model)
            assert session.size == base + sum(part.size for part in parts[1:])

    def _find(self, key: str, model: str, tokenizer: Tokenizer) -> _Session | None:
        session = self._sessions.get(key)
        return session if session is not None and session.model == model and session.tokenizer() is tokenizer else None

    def _open(self, key: str, model: str, tokenizer: Tokenizer, lane: str) -> _Session:
        session = self._find(key, model, tokenizer)
        if session is not None:
            self._sessions.move_to_end(key)
            return session
        self.forget(key)
        session = self._sessions[key] = _Session(key, model, tokenizer, lane)
        self._settle(session, session.size)
        return session

    async def _remember(
        self, key: str, session: _Session, path: Sequence[_Part], known: Sequence[_Piece], new: Sequence[_Piece]
    ) -> _Part | None:
        """Adds the new pieces after the known path, or all pieces if that path is gone. Returns the last part.

        Does not suspend for a few pieces. None if the session was forgotten while others went on.
        """
        end = path[-1] if path else session.root
        if not session.holds(end):
            end, new = session.root, [*known, *new]
        for start in range(0, len(new), MAX_REMEMBERED_AT_ONCE):
            if start:
                await asyncio.sleep(0)
                if self._sessions.get(key) is not session or not session.holds(end):
                    return None
            size = session.size
            for piece in new[start : start + MAX_REMEMBERED_AT_ONCE]:
                end = session.put(end, *piece, replaces=False)
            self._settle(session, session.size - size)
        return end

    def _settle(self, session: _Session, growth: int) -> None:
        self._count(session.lane, growth)
        while self.bytes > self._max_bytes:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            self.forget(next(key for key, each in self._sessions.items() if each.lane == largest))

    def _count(self, lane: str, growth: int) -> None:
        self.bytes += growth
        self._bytes_of[lane] += growth
        if not self._bytes_of[lane]:
            del self._bytes_of[lane]


def _encode(
    tokenizer: Tokenizer,
    known: Sequence[_Piece],
    text: str,
    memo: Memo | None,
    check: Callable[[int], object] | None,
    images: Mapping[bytes, ImageLayout],
) -> Steps[tuple[list[_Piece], tuple[int, ...], int]]:
    """The pieces of this text, the tokens of the known pieces followed by its own, and how many of these were not in the memo."""
    pieces = []
    encoded = 0
    for part in cut_at_marks(tokenizer, text) if images else tokenizer.parts(text):
        packed = None if memo is None else memo.get(part)
        if packed is not None:
            pieces.append(_Piece(part, packed))
            continue
        made = []
        for token_ids in _encode_part(tokenizer, part, images):
            made.append(_pack(token_ids, part))
            yield
        pieces.append(_Piece(part, b"".join(made)))
        encoded += pieces[-1].tokens
        if memo is not None:
            memo[part] = pieces[-1].packed
    together = (*known, *pieces)
    if check is not None:
        check(_count(together, images))
    alike = groupby(together, lambda piece: piece.is_image) if images else [(False, iter(together))]
    runs = [(is_image, b"".join([piece.packed for piece in run])) for is_image, run in alike]
    if len(runs) == 1 and len(runs[0][1]) <= STEP_BYTES:
        return pieces, _unpack(*runs[0]), encoded
    unpacked: list[int] = []
    for is_image, packed in runs:
        for start in range(0, len(packed), STEP_BYTES):
            unpacked += _unpack(is_image, packed[start : start + STEP_BYTES])
            yield
    return pieces, tuple(unpacked), encoded


def _encode_part(tokenizer: Tokenizer, part: str, images: Mapping[bytes, ImageLayout]) -> Iterator[Sequence[int]]:
    if images and part.startswith(EDGE):
        yield encode_image(tokenizer, images[marked_name(part)])
    elif BREAK in part:
        for piece in part.split(BREAK):
            yield from tokenizer.encode_part_steps(piece)
    else:
        yield from tokenizer.encode_part_steps(part)


def _spans(pieces: Sequence[_Piece], images: Mapping[bytes, ImageLayout]) -> tuple[ImageSpan, ...]:
    found = []
    end = 0
    for piece in pieces:
        start, end = end, end + piece.tokens
        if piece.is_image:
            layout = images[marked_name(piece.text)]
            found.append(ImageSpan(layout.name, start, end, layout.grid, layout.size))
    return tuple(found)


def _count(pieces: Sequence[_Piece], images: Mapping[bytes, ImageLayout]) -> int:
    """Their tokens. There may be thousands of pieces: those of text are counted together."""
    return sum([piece.tokens for piece in pieces]) if images else sum([len(piece.packed) for piece in pieces]) // TOKEN_BYTES


def _counts(tokenizer: Tokenizer, pieces: Sequence[_Piece], marks: Sequence[int]) -> tuple[int, ...]:
    """How many tokens come before each position in the text of these pieces."""
    return tuple([tokens_before(tokenizer, _unpacked(pieces), mark) for mark in marks])


def _unpacked(pieces: Sequence[_Piece]) -> Iterator[tuple[str, Sequence[int]]]:
    return ((piece.text, memoryview(piece.packed).cast("Q" if piece.is_image else "I")) for piece in pieces)


def _pack(token_ids: Sequence[int], part: str) -> bytes:
    # Text takes at most a quarter of the size of a tuple.
    return array("Q" if part.startswith(EDGE) else "I", token_ids).tobytes()


def _unpack(is_image: bool, packed: bytes) -> tuple[int, ...]:
    if is_image:
        return struct.unpack(f"={len(packed) // IMAGE_TOKEN_BYTES}Q", packed)
    return struct.unpack(f"={len(packed) // TOKEN_BYTES}I", packed)
