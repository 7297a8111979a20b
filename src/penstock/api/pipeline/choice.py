"""One choice of an answer, from its tokens to its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field

from msgspec import structs

from penstock.api.pipeline.dialect import Dialect, Ending
from penstock.api.pipeline.plan import Plan
from penstock.stream.mailbox import Arrival
from penstock.stream.slot import check_contiguous
from penstock.text.detokenizer import TextAssembler
from penstock.text.output import CallBroken, CallEnd, OutputParser, Part, Reasoning
from penstock.wire.messages import Delta, Finish, PromptReport, Terminal

_NOTHING: tuple[Part, ...] = ()

MAX_WEIGHT = 1536
"""What is rendered in one go: 2 to 5 ms. A logprob, of a token or of an alternative, has the weight 1."""

ARRIVAL_WEIGHT = 8
TOKEN_WEIGHT = 0.25
# Of a token that is looked at by itself, and of each stop string that is looked for after it.
SINGLE_WEIGHT, STOP_WEIGHT = 2.0, 2.0
# Of the prompt that the first event of a choice repeats.
CHARACTERS_PER_WEIGHT, IDS_PER_WEIGHT = 256, 32


def token_weight(plan: Plan) -> float:
    """How long each token of an answer takes to render."""
    if plan.one_call or plan.request.stops:
        return SINGLE_WEIGHT + STOP_WEIGHT * len(plan.request.stops)
    return TOKEN_WEIGHT


def weight_of(arrival: Arrival, token_weight: float = TOKEN_WEIGHT) -> int:
    """How long an arrival takes to render."""
    delta = arrival.delta
    if delta is None:
        return ARRIVAL_WEIGHT
    weight = ARRIVAL_WEIGHT + int(len(delta.token_ids) * token_weight)
    if delta.logprobs:
        weight += len(delta.logprobs) * (1 + len(delta.logprobs[0].top))
    if delta.prompt is not None and delta.prompt.logprobs is not None:
        # A packed alternative has 11 to 15 bytes.
        weight += sum(map(len, delta.prompt.logprobs)) // 11
    return weight


def pieces_of(arrival: Arrival, token_weight: float = TOKEN_WEIGHT) -> Iterator[Arrival]:
    """The same as several arrivals of at most about MAX_WEIGHT: first the prompt's logprobs, then the tokens, and with the last the end."""
    delta = arrival.delta
    if delta is None or weight_of(arrival, token_weight) <= MAX_WEIGHT:
        yield arrival
        return
    prompt = delta.prompt
    if prompt is not None:
        for packed in prompt.logprobs or ():
            yield Arrival(arrival.choice, Delta(delta.offset, (), None, structs.replace(prompt, logprobs=(packed,))), None)
    alternatives = len(delta.logprobs[0].top) if delta.logprobs else 0
    step = max(1, int(MAX_WEIGHT / (1 + alternatives + token_weight)))
    for start in range(0, len(delta.token_ids) or 1, step):
        end = start + step
        logprobs = None if delta.logprobs is None else delta.logprobs[start:end]
        report = structs.replace(prompt, logprobs=None) if prompt is not None and not start else None
        is_last = end >= len(delta.token_ids)
        piece = Delta(delta.offset + start, delta.token_ids[start:end], logprobs, report)
        yield Arrival(arrival.choice, piece, arrival.terminal if is_last else None)


@dataclass(slots=True, eq=False)
class Choice:
    """Turns the deltas of one generation into parts, and counts them. `ending` is None until it has ended."""

    index: int
    plan: InitVar[Plan]
    dialect: Dialect
    tokens: int = 0
    report: PromptReport | None = None
    """What the worker has reported about its prompt."""
    calls: int = 0
    broken_calls: int = 0
    logprob: float = 0.0
    """The sum of the logprobs of its tokens, if they were asked for."""
    ending: Ending | None = None
    answer: list[int] | None = None
    """Its tokens, if the session's next turn repeats them."""
    is_whole: bool = False
    opening_weight: int = 0
    """How long what comes before its first token takes to render. 0 afterwards."""
    _assembler: TextAssembler = field(init=False)
    _parser: OutputParser | None = None
    _one_call: bool = False
    _text_length: int = 0
    _reasoning_length: int = 0
    _opening: str = ""
    _next_offset: int = 0

    def __post_init__(self, plan: Plan) -> None:
        request = plan.request
        detokenizer = plan.model.tokenizer.detokenizer(plan.visible_tokens, request.skip_special_tokens is not False)
        self._assembler = TextAssembler(detokenizer, request.stops, bool(request.include_stop_str_in_output))
        self._parser = None if plan.parser is None else plan.parser()
        self._one_call = plan.one_call
        self._opening = self.dialect.opening(self.index)
        repeated = len(plan.submits[self.index].token_ids) if request.return_token_ids else 0
        self.opening_weight = len(self._opening) // CHARACTERS_PER_WEIGHT + repeated // IDS_PER_WEIGHT
        if plan.remembers:
            self.answer = []

    @property
    def score(self) -> float:
        """The mean logprob of its tokens: the higher, the likelier."""
        return self.logprob / self.tokens if self.tokens else 0.0

    @property
    def reasoning_tokens(self) -> int:
        """How many of its tokens were reasoning, by its share of the text. So it does not depend on how the tokens were split."""
        return round(self.tokens * self._reasoning_length / self._text_length) if self._reasoning_length else 0

    def advance(self, delta: Delta | None, terminal: Terminal | None) -> tuple[Sequence[Part], object]:
        """The parts and logprobs that a delta and a terminal add. Sets `ending` at the end, or at a stop string.

        This is the last hop, so the offset is checked once more: a lost token raises StreamError.
        """
        text, self._opening = self._opening, ""
        self.opening_weight = 0
        logprobs = None
        parts: Sequence[Part] = _NOTHING
        if delta is not None:
            if delta.offset != self._next_offset:
                check_contiguous(self._next_offset, delta)
            self._next_offset += len(delta.token_ids)
            before = self.tokens
            parts = self._take(text, delta.token_ids) if not self._one_call else self._take_singly(delta.token_ids)
            text = ""
            if self.answer is not None:
                self.answer += delta.token_ids
            if delta.logprobs is not None or delta.prompt is not None:
                logprobs = self._take_reports(delta, self.tokens - before)
        if self.ending is None and isinstance(terminal, Finish):
            last = self._assembler.finish()
            self.is_whole = not last.stopped
            parts = [*parts, *self._end(text + last.text, "stop" if last.stopped else terminal.reason)]
        return parts, logprobs

    def _take(self, text: str, token_ids: Sequence[int]) -> Sequence[Part]:
        """What these tokens add, after `text`."""
        part = self._assembler.feed(token_ids)
        self.tokens += part.tokens
        text = text + part.text if text else part.text
        if part.stopped:
            return self._end(text, "stop")
        if self._parser is None:
            return (text,) if text else _NOTHING
        self._text_length += len(text)
        return self._noted(self._parser.feed(text)) if text else _NOTHING

    def _take_singly(self, token_ids: Sequence[int]) -> Sequence[Part]:
        """The same for a choice that ends with its first call: one token at a time, to know which one ended it."""
        parts: list[Part] = []
        for token_id in token_ids:
            parts += self._take("", (token_id,))
            if self.calls and self.ending is None:
                del parts[parts.index(next(part for part in parts if type(part) is CallEnd)) + 1 :]
                self.ending = Ending("tool_calls")
            if self.ending is not None:
                break
        return parts

    def _take_reports(self, delta: Delta, tokens: int) -> object:
        if delta.prompt is not None:
            self.report = delta.prompt
        if delta.logprobs is not None:
            self.logprob += sum(entry.logprob for entry in delta.logprobs[:tokens])
        return self.dialect.logprobs(self.index, delta, tokens)

    def _end(self, text: str, reason: str) -> Sequence[Part]:
        if self._parser is None:
            parts: Sequence[Part] = (text,) if text else _NOTHING
        else:
            self._text_length += len(text)
            parts = self._noted([*(self._parser.feed(text) if text else _NOTHING), *self._parser.finish()])
        self.ending = Ending("tool_calls" if self.calls and reason == "stop" else reason, self._assembler.matched)
        return parts

    def _noted(self, parts: Sequence[Part]) -> Sequence[Part]:
        for part in parts:
            if type(part) is Reasoning:
                self._reasoning_length += len(part.text)
            elif type(part) is CallEnd:
                self.calls += 1
            elif type(part) is CallBroken:
                self.broken_calls += 1
        return parts
