"""One generation in the embedded engine: a sequence with what sampling needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.engine.scheduler import Sequence
from penstock.engine.vision.positions import shift_behind
from penstock.grammar.grammar import GrammarMatcher
from penstock.kv.sessions import Session
from penstock.wire.images import FIRST_IMAGE_ID
from penstock.wire.messages import SessionState, Submit, TokenLogprob


class SampledSequence(Sequence):
    """`prompt_logprobs` is None unless the request asks for them. Counts of tokens are kept only for requests with penalties."""

    __slots__ = ("generated_counts", "matcher", "prompt_logprobs", "prompt_tokens")

    def __init__(self, request: Submit, session: Session | None = None, session_state: SessionState | None = None) -> None:
        super().__init__(request, session, session_state)
        self.position_shift = shift_behind(request.images)
        self.prompt_logprobs: list[TokenLogprob | None] | None = [None] if request.prompt_logprobs else None
        self.matcher: GrammarMatcher | None = None
        sampling = request.sampling
        has_penalty = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        prompt = len(request.token_ids) - request.offset
        # Positions of images are no tokens that could be repeated.
        seen = [each for each in request.token_ids[:prompt] if each < FIRST_IMAGE_ID] if has_penalty else []
        self.prompt_tokens = frozenset(seen)
        self.generated_counts = Counter(request.token_ids[prompt:]) if has_penalty else None

    @property
    def position(self) -> int:
        """The offset of the next token."""
        return self.request.offset + len(self.tokens) - len(self.request.token_ids)

    @property
    def skips_cache(self) -> bool:
        """Cached KV has no logits."""
        return self.prompt_logprobs is not None and not self.is_reported

    def add_prompt_logprobs(self, found: Iterable[TokenLogprob | None]) -> None:
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += found

    def forget_pages(self) -> None:
        super().forget_pages()
        if self.skips_cache:
            self.prompt_logprobs = [None]

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.generated_counts is not None:
            self.generated_counts[token] += 1
