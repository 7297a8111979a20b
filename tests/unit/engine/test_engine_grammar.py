"""Grammars through the engine: with everything that can come together with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers

from penstock.config.engines import EngineConfig
from penstock.engine.engine import Engine
from penstock.grammar.grammar import GrammarCompiler, GrammarMatcher
from penstock.wire.messages import Export, Fault, Finish, Grammar, Sampling, SessionTurn
from tiny_models import Collected, generation_id, make_model, make_submit, run

WILD = Sampling(temperature=2.0)


def _byte_tokenizer() -> Any:
    """One token a byte, and an end: it fits into the tiny model's vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=260, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["ab"], trainer)
    return tokenizer


TOKENIZER = _byte_tokenizer()
SIZE = TOKENIZER.get_vocab_size()
ENDS = frozenset({0})
COMPILER = GrammarCompiler(TOKENIZER.to_str(), SIZE, ENDS)
A, B = TOKENIZER.encode("a").ids[0], TOKENIZER.encode("b").ids[0]


class CountingCompiler:
    """The real compiler, with a gate before it for grammars that ask for one."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.gate = threading.Event()

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        self.compiled.append(grammar.source)
        if "slow" in grammar.source:
            self.gate.wait(30)
        if "odd" in grammar.source:
            raise RuntimeError("something odd")
        return COMPILER.compile(grammar)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start(compiler: Any = COMPILER, clock: Callable[[], float] = time.monotonic, **settings: Any) -> Engine:
        config = EngineConfig(**{"context_length": 2048, "kv_pages": 200, "session_grace": 0.0, **settings})
        engines.append(Engine(config, make_model("llama"), ENDS, SIZE, compiler, clock))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def text(collected: Collected, number: int) -> str:
    return str(TOKENIZER.decode(collected.tokens[generation_id(number)]))


@pytest.mark.parametrize(
    "fields",
    [{}, {"min_tokens": 9}, {"ignore_eos": True}, {"stop_ids": (0,)}, {"sampling": WILD, "min_tokens": 9, "ignore_eos": True}],
    ids=["plain", "min_tokens", "ignore_eos", "stop_ids", "all"],
)
def test_the_grammar_wins(make: Callable[..., Engine], fields: dict[str, Any]) -> None:
    collected = run(make(), [make_submit(0, [5, 6, 7], 30, grammar=Grammar("choice", '["river","dam"]'), **fields)])
    assert text(collected, 0) in ("river", "dam")
    assert collected.terminals[generation_id(0)] == Finish("stop")


def test_restricted_and_free_ones_in_one_batch(make: Callable[..., Engine]) -> None:
    free = [make_submit(number, [number + 1, 2, 3], 12) for number in range(3)]
    regexes = ["[0-9]{5}", "(ab){3}", "[x-z]{2,4}"]
    bound = [
        make_submit(10 + index, [9, index + 1], 30, seed=index, sampling=WILD, grammar=Grammar("regex", regex))
        for index, regex in enumerate(regexes)
    ]
    engine = make(kv_pages=20, token_budget=24)
    together = run(engine, [*free, *bound])
    for request in bound:
        alone = run(make(), [request])
        assert together.tokens[request.id] == alone.tokens[request.id], "the same as alone"
    assert text(together, 10).isdigit()
    assert text(together, 11) == "ababab"


def test_a_preempted_one_keeps_its_place_in_the_grammar(make: Callable[..., Engine]) -> None:
    requests = [
        make_submit(number, [1 + number, 2, 3], 80, seed=number, sampling=WILD, grammar=Grammar("regex", "[ab]{60}")) for number in range(6)
    ]
    engine = make(kv_pages=16)
    collected = run(engine, requests)
    assert engine.stats().preemptions
    assert all(set(text(collected, number)) <= set("ab") and len(text(collected, number)) == 60 for number in range(6))


def test_one_that_goes_on_from_the_middle_is_where_it_was(make: Callable[..., Engine]) -> None:
    grammar = Grammar("regex", "(ab){10}")
    whole = run(make(), [make_submit(0, [1, 2], 40, grammar=grammar)]).tokens[generation_id(0)]
    resumed = run(make(), [make_submit(1, [1, 2, *whole[:7]], 40, grammar=grammar, offset=7)])
    assert resumed.tokens[generation_id(1)] == whole[7:]
    wrong = run(make(), [make_submit(2, [1, 2, B], 40, grammar=grammar, offset=1)]).terminals[generation_id(2)]
    assert isinstance(wrong, Fault), "what was generated elsewhere does not fit the grammar"


def test_choices_share_one_compilation_and_nothing_else(make: Callable[..., Engine]) -> None:
    compiler = CountingCompiler()
    requests = [make_submit(number, [1, 2], 20, seed=number, sampling=WILD, grammar=Grammar("regex", "[a-z]{8}")) for number in range(5)]
    collected = run(make(compiler), requests)
    assert compiler.compiled == ["[a-z]{8}"]
    assert len({text(collected, number) for number in range(5)}) > 1
    assert all(len(text(collected, number)) == 8 for number in range(5))


def test_a_grammar_that_becomes_too_complex_is_a_fault_and_no_end(make: Callable[..., Engine]) -> None:
    grammar = Grammar("lark", 'start: s "b"\ns: s s s s | "a"')
    terminal = run(make(), [make_submit(0, [1, 2], 1500, grammar=grammar, logit_bias=((A, 100.0),))]).terminals[generation_id(0)]
    assert isinstance(terminal, Fault)
    assert terminal.code == "grammar_broken"


@pytest.mark.parametrize(("source", "says"), [("[a", "unclosed"), ("odd", "something odd")])
def test_one_that_cannot_be_compiled_hurts_no_other(make: Callable[..., Engine], source: str, says: str) -> None:
    engine = make(CountingCompiler())
    session = SessionTurn("a", "open", 10.0)
    wrong = make_submit(0, [1, 2], 5, grammar=Grammar("regex", source), session=session)
    collected = run(engine, [wrong, make_submit(1, [1, 2, 3], 5)])
    terminal = collected.terminals[generation_id(0)]
    assert isinstance(terminal, Fault)
    assert (terminal.code, says in terminal.message) == ("invalid_grammar", True), terminal
    assert collected.terminals[generation_id(1)] == Finish("length")
    opened = engine.sessions.get("a")
    assert opened is not None
    assert opened.active_turns == 0


def test_cancelled_while_it_is_compiled(make: Callable[..., Engine]) -> None:
    compiler = CountingCompiler()
    engine = make(compiler)
    engine.submit(make_submit(0, [1, 2], 5, grammar=Grammar("regex", "slow"), session=SessionTurn("a", "open", 10.0)))
    assert engine.step() == []
    assert engine.stats().queued == 1
    engine.cancel(generation_id(0))
    engine.check_integrity()
    assert not engine.has_work
    compiler.gate.set()


def test_a_worker_that_pulls_waits_for_a_slow_grammar(make: Callable[..., Engine]) -> None:
    """The Submit is here, however long its grammar is compiled: the puller's patience for it is over."""
    now, compiler, transfer = [0.0], CountingCompiler(), b"t" * 16
    engine = make(compiler, lambda: now[0])
    engine.submit(make_submit(0, [1] * 40, 2, grammar=Grammar("regex", "slow|a"), export=Export(transfer, 10.0)))
    engine.moves.export(transfer, [b"n" * 16], waits=True)
    now[0] = 5.0
    engine.step()
    assert (engine.transfers.exports, engine.transfers.take_reports()) == (1, [])
    compiler.gate.set()
    while engine.has_work:
        engine.step()
    now[0] = 16.0
    engine.step()
    assert [(report.id, report.outcome) for report in engine.transfers.take_reports()] == [(transfer, "expired")]
    assert engine.transfers.exports == 0


def test_slow_grammars_are_refused_and_those_behind_them_are_not(make: Callable[..., Engine]) -> None:
    now = [0.0]
    compiler = CountingCompiler()
    engine = make(compiler, lambda: now[0])
    for number in range(2):
        engine.submit(make_submit(number, [1, 2], 5, grammar=Grammar("regex", f"slow{number}")))
    engine.submit(make_submit(9, [1, 2], 5, grammar=Grammar("regex", "a")))
    collected = Collected()
    while len(compiler.compiled) < 2:
        collected.step(engine)
    now[0] = 11.0
    collected.step(engine)
    assert {terminal.code for terminal in collected.terminals.values() if isinstance(terminal, Fault)} == {"invalid_grammar"}
    assert collected.terminals.keys() == {generation_id(0), generation_id(1)}
    compiler.gate.set()
    while engine.has_work:
        collected.step(engine)
    assert text(collected, 9) == "a"


def test_padding_rows_of_the_model_are_never_chosen(make: Callable[..., Engine]) -> None:
    """The model has 300 rows, the tokenizer fewer."""
    requests = [
        make_submit(number, [1 + number, 2], 40, seed=number, sampling=Sampling(temperature=3.0), ignore_eos=True) for number in range(8)
    ]
    requests.append(make_submit(9, [1, 2], 40, logit_bias=((SIZE - 1, 50.0),)))
    collected = run(make(), requests)
    assert max(token for tokens in collected.tokens.values() for token in tokens) < SIZE
    refused = run(make(), [make_submit(0, [1, 2], 4, stop_ids=(SIZE,))]).terminals[generation_id(0)]
    assert isinstance(refused, Fault)
    assert refused.code == "invalid_token"


def test_without_a_compiler_a_grammar_is_refused_by_name() -> None:
    engine = Engine(EngineConfig(512, 32), make_model("llama"), ENDS, SIZE, None, time.monotonic)
    terminal = run(engine, [make_submit(0, [1, 2], 4, grammar=Grammar("regex", "a"))]).terminals[generation_id(0)]
    assert terminal == Fault("unsupported", "this model's tokenizer has no grammar support")
