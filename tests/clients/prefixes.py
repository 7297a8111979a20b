"""How much of each prompt the engine already has: the tokens that consecutive prompts of one conversation share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from clients.upstream import Prompt

# A prompt that shares less than this with an earlier turn begins another conversation.
MIN_SHARE = 0.5
# Stands before each answer, by the template of the test model. A prompt ends with one.
ANSWER = "<|im_start|>assistant"


@dataclass(frozen=True)
class Turn:
    """A prompt that continues a conversation. `reusable`: the tokens of the turn before it, with its answer, as far as this prompt is that
    long. `shared`: how many of them are the same from the start."""

    prompt: Prompt
    before: Prompt
    reusable: int
    shared: int

    @property
    def share(self) -> float:
        return self.shared / self.reusable

    def __str__(self) -> str:
        return f"{self.shared} of {self.reusable} tokens; then {self.difference}"

    @property
    def difference(self) -> str:
        """What is not the same, for a failure's message."""
        texts = self.before.text + self.before.answer, self.prompt.text
        at = next((place for place, (one, other) in enumerate(zip(*texts, strict=False)) if one != other), min(map(len, texts)))
        near = slice(max(at - 40, 0), at + 80)
        return f"{texts[0][near]!r} became {texts[1][near]!r}"


def shared_tokens(before: Sequence[int], after: Sequence[int]) -> int:
    """The length of the common prefix."""
    for place, (one, other) in enumerate(zip(before, after, strict=False)):
        if one != other:
            return place
    return min(len(before), len(after))


def turns(prompts: Sequence[Prompt], conversation: Callable[[Prompt], Hashable] | None = None) -> list[Turn]:
    """Every prompt but the first of each conversation, compared with the turn before it.

    `conversation` names the conversation of a prompt, such as an agent's. Without it, a prompt with earlier answers continues the
    conversation whose last turn it shares the largest part with, if that is at least MIN_SHARE. A turn that is longer than the prompt is
    not its last: the same chat over another API went further.
    """
    found: list[Turn] = []
    last: dict[Hashable, Prompt] = {}
    for number, prompt in enumerate(prompts):
        candidates = {key: _compare(before, prompt) for key, before in last.items()}
        if conversation is not None:
            key = conversation(prompt)
            turn = candidates.get(key)
        else:
            shorter = [key for key, before in last.items() if len(before.known_ids) <= len(prompt.token_ids)]
            key = max(shorter, key=lambda one: candidates[one].share, default=number)
            turn = candidates.get(key)
            if turn is not None and (turn.share < MIN_SHARE or prompt.text.count(ANSWER) == 1):
                key, turn = number, None
        last[key] = prompt
        if turn is not None:
            found.append(turn)
    return found


def _compare(before: Prompt, prompt: Prompt) -> Turn:
    known = before.known_ids
    return Turn(prompt, before, min(len(known), len(prompt.token_ids)), shared_tokens(known, prompt.token_ids))
