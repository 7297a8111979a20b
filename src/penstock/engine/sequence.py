"""One generation in the engine."""

from __future__ import annotations

from collections import Counter

from penstock.grammar.grammar import GrammarMatcher
from penstock.kv.radix import Lease, Node
from penstock.kv.sessions import Session
from penstock.wire.messages import SessionState, Submit, TokenLogprob


class Sequence:
    """Its tokens, how many of them have KV, and the pages that hold it: a path in the tree, then a tail that only it fills.

    `tokens` is the prompt and what was generated; the KV of the first `computed` of them is there.
    """

    __slots__ = (
        "cached_tokens",
        "computed",
        "generated_counts",
        "matcher",
        "path",
        "prompt_logprobs",
        "prompt_tokens",
        "reported",
        "request",
        "session",
        "session_state",
        "tail",
        "tokens",
    )

    def __init__(self, request: Submit, session: Session | None = None, session_state: SessionState | None = None) -> None:
        self.request = request
        self.session = session
        self.session_state = session_state
        self.tokens = list(request.token_ids)
        self.computed = 0
        self.path: list[Node] = []
        self.tail: list[int] = []
        # Known at the first admission and told with the first token; a preemption does not change it.
        self.cached_tokens: int | None = None
        self.reported = False
        self.prompt_logprobs: list[TokenLogprob | None] | None = [None] if request.prompt_logprobs else None
        self.matcher: GrammarMatcher | None = None
        sampling = request.sampling
        penalised = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        prompt = len(request.token_ids) - request.offset
        self.prompt_tokens = frozenset(request.token_ids[:prompt]) if penalised else frozenset()
        self.generated_counts = Counter(request.token_ids[prompt:]) if penalised else None

    @property
    def position(self) -> int:
        """The offset of the next token to make."""
        return self.request.offset + len(self.tokens) - len(self.request.token_ids)

    @property
    def to_compute(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def pages(self) -> list[int]:
        return [*[node.page for node in self.path], *self.tail]

    @property
    def lease(self) -> Lease | None:
        """That of its session, unless the session is over: then it is a sequence like any other."""
        return None if self.session is None or self.session.is_over else self.session.lease

    def forget_pages(self) -> None:
        """Its pages were given back: all is to be computed anew."""
        self.path, self.tail, self.computed = [], [], 0
        if self.prompt_logprobs is not None and not self.reported:
            self.prompt_logprobs = [None]

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.generated_counts is not None:
            self.generated_counts[token] += 1
