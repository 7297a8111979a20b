"""Where marks in messages are in a rendered chat, and how many tokens come before them.

A template may trim, rewrite or leave out any text. So the chat is rendered once more with a character at each mark that no text can
contain, and both renderings are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from penstock.text.images import EDGE
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, Tokenizer

MAX_PLACES = 128
# UTF-8 has no bytes for surrogates, so no message contains one.
_FIRST = 0xDB00


class Place(NamedTuple):
    """Behind the first `characters` of a message's content. Behind all messages is the end of the chat."""

    message: int
    characters: int


def with_marks(prompt: ChatPrompt, places: Sequence[Place]) -> ChatPrompt:
    """The prompt with a character at each place, at most MAX_PLACES."""
    messages = list(prompt.messages)
    # From the last to the first, so that those before stay where they are.
    for number, (message, characters) in sorted(enumerate(places), key=lambda each: (each[1], each[0]), reverse=True):
        if message < len(messages):
            content = messages[message]["content"]
            cut = _cut(content, characters)
            messages[message] = ChatMessage({**messages[message], "content": f"{content[:cut]}{chr(_FIRST + number)}{content[cut:]}"})
    return structs.replace(prompt, messages=messages)


def _cut(content: str, characters: int) -> int:
    """Never between whitespace and the end of the content: the template may trim it."""
    end = len(content[:characters].rstrip())
    return end or len(content) - len(content.lstrip())


def positions(text: str, marked: str, messages: int, places: Sequence[Place]) -> list[int]:
    """Where the places are in `text`, the rendering without marks. Never behind the place: where the two differ, nothing is certain."""
    found: dict[int, int] = {}
    position = start = 0
    for place, number in sorted((marked.rfind(chr(_FIRST + number)), number) for number in range(len(places))):
        if place < 0:
            continue
        piece = marked[start:place]
        if not text.startswith(piece, position):
            position += _common(piece, text[position : position + len(piece)])
            break
        position += len(piece)
        found[number] = position
        start = place + 1
    else:
        # Those that are not found were left out by the template.
        position = 0
    exact = [len(text) if place.message >= messages else found.get(number, position) for number, place in enumerate(places)]
    return [max(exact[: number + 1]) for number in range(len(exact))]


def _common(first: str, second: str) -> int:
    """How many leading characters they have in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def tokens_before(tokenizer: Tokenizer, parts: Iterator[tuple[str, Sequence[int]]], position: int) -> int:
    """How many tokens end before this position, of a text in parts with their tokens. A token more or less, if a tokenizer changes text."""
    tokens = 0
    for text, token_ids in parts:
        if position < len(text):
            # No place is inside of an image.
            return tokens if text.startswith(EDGE) else tokens + _tokens_within(tokenizer, text, token_ids, position)
        position -= len(text)
        tokens += len(token_ids)
    return tokens


def _size(text: str) -> int:
    """In bytes. The built-in tokenizer has surrogates for roles, whose tokens are no text."""
    return len(text.encode(errors="ignore"))


def _tokens_within(tokenizer: Tokenizer, text: str, token_ids: Sequence[int], position: int) -> int:
    """Counts from the nearer end: most marks are at the end of a message, where a part ends, too."""
    token_bytes = tokenizer.token_bytes
    if position <= len(text) // 2:
        left, count = _size(text[:position]), 0
        for token_id in token_ids:
            left -= len(token_bytes(token_id))
            if left < 0:
                break
            count += 1
        return count
    left, count = _size(text[position:]), len(token_ids)
    while left > 0 and count:
        count -= 1
        left -= len(token_bytes(token_ids[count]))
    return count
