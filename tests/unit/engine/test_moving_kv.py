"""KV that moves between two real engines: a prompt is computed on one and continued on the other, and the answer is that of one alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import tokenizers

from moving import Hub, MemoryTransport
from penstock.config.engines import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.model import Model
from penstock.engine.shape import RopeScaling
from penstock.grammar.grammar import GrammarCompiler
from penstock.kv.moving import KvTransport, SlotMemory
from penstock.wire.messages import Delta, Export, Fetch, Finish, Grammar, KvSource, Sampling, SessionTurn, Submit, TransferReport
from tiny_models import (
    Collected,
    generation_id,
    make_engine,
    make_model,
    make_submit,
    random_prompt,
    reference,
    run,
)

SAMPLED = Sampling(temperature=0.9, top_p=0.95)
MOVE = (77).to_bytes(16)


class DirectKv:
    """A `kv.moving.KvEngine` in the thread of its engine."""

    def __init__(self, engine: Engine) -> None:
        assert engine.memory is not None
        self.engine = engine
        self.fingerprint = engine.fingerprint()
        self.memory: SlotMemory = engine.memory

    def connect(self, transport: KvTransport) -> None:
        self.engine.connect(transport)

    def export(self, transfer: bytes, names: Sequence[bytes], *, waits: bool) -> None:
        self.engine.moves.export(transfer, names, waits=waits)

    def release(self, transfer: bytes) -> None:
        self.engine.moves.release(transfer)

    def arrived(self, transfer: bytes, blocks: int) -> None:
        self.engine.moves.arrived(transfer, blocks)

    def pull_ended(self, transfer: bytes, failure: str) -> None:
        self.engine.moves.pull_ended(transfer, failure)


class Cluster:
    """A prefill engine, a decode engine, and what a front end does between them. `on_event` is called before each event, by number."""

    def __init__(self, make: Callable[[], Engine], on_event: Callable[[Cluster, int], None] = lambda cluster, event: None) -> None:
        self.hub = Hub()
        self.p, self.d = make(), make()
        self.answers = {self.p: Collected(), self.d: Collected()}
        self.on_event = on_event
        self.events = 0
        self.is_cancelled = False
        self.reports: list[TransferReport] = []
        self.transports: dict[Engine, MemoryTransport] = {}
        for address, engine in (("p", self.p), ("d", self.d)):
            kv = DirectKv(engine)
            self.transports[engine] = self.hub.add(address, kv)
            kv.connect(self.transports[engine])

    def event(self) -> None:
        self.on_event(self, self.events)
        self.events += 1
        for engine in (self.p, self.d):
            engine.check_integrity()

    def step(self, engine: Engine) -> None:
        self.event()
        self.answers[engine].step(engine)
        self.reports += engine.transfers.take_reports()

    def move(self) -> None:
        """What is on its way goes on: an engine steps while copies are under way."""
        self.event()
        for engine in (self.p, self.d):
            if engine.copies is not None and engine.copies.is_busy:
                self.answers[engine].step(engine)
        self.hub.move()

    @property
    def is_prefill_alive(self) -> bool:
        return "p" in self.hub.transports

    def generate(self, request: Submit, most: int = 400) -> list[Delta]:
        """The first token from the one engine, the others from the other. If the one is gone before, all from the other."""
        deltas: list[Delta] = []
        source = KvSource(MOVE, "p", waits=True)
        self.p.submit(msgspec.structs.replace(request, max_tokens=1, export=Export(MOVE, 5.0), session=None))
        self.d.transfers.fetch(Fetch(source, request.token_ids, 5.0, root=request.root))
        while self.is_prefill_alive and request.id not in self.answers[self.p].terminals and not self.is_cancelled:
            self.step(self.p)
            self.move()
            self.step(self.d)
        if self.is_prefill_alive:
            deltas = self.answers[self.p].deltas.get(request.id, [])
            assert self.is_cancelled or self.answers[self.p].terminals[request.id] == Finish("length")
        known = tokens_of(deltas)
        fields = {"token_ids": (*request.token_ids, *known), "offset": len(known), "source": source}
        rest = msgspec.structs.replace(request, **fields, prompt_logprobs=request.prompt_logprobs and not known)
        if not self.is_cancelled:
            self.d.submit(rest)
        while request.id not in self.answers[self.d].terminals and not self.is_cancelled:
            assert self.events < most, "it takes for ever"
            self.step(self.d)
            self.move()
        self.settle()
        return [*deltas, *self.answers[self.d].deltas.get(request.id, [])]

    def cancel(self, request: Submit) -> None:
        self.is_cancelled = True
        for engine in (self.p, self.d):
            engine.cancel(request.id)

    def settle(self) -> None:
        """The front end ends the transfer at both. Nothing is left of it."""
        for engine in (self.p, self.d):
            engine.transfers.end(MOVE)
        for _ in range(3):
            self.hub.move()
        for engine, transport in self.transports.items():
            if transport not in self.hub.transports.values():
                continue
            engine.step()
            while engine.has_work:
                engine.step()
            engine.check_integrity()
            engine.check_idle()
            stats = engine.stats()
            assert (stats.imports, stats.exports, engine.transfers.held_pages, stats.kv_blocks_used) == (0, 0, 0, 0)


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def logprobs_of(deltas: Sequence[Delta]) -> list[float]:
    return [logprob.logprob for delta in deltas for logprob in delta.logprobs or ()]


def alone(make: Callable[[], Engine], request: Submit) -> list[Delta]:
    return run(make(), [request]).deltas[request.id]


@pytest.mark.parametrize("sampling", [{}, {"sampling": SAMPLED, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen2"])
def test_the_tokens_are_those_of_one_engine_alone(family: str, sampling: dict[str, Any]) -> None:
    def make() -> Engine:
        return make_engine(family, token_budget=48)

    request = make_submit(1, random_prompt(3, 141), 30, logprobs=2, **sampling)
    expected = alone(make, request)
    cluster = Cluster(make)
    made = cluster.generate(request)
    assert tokens_of(made) == tokens_of(expected)
    assert logprobs_of(made) == pytest.approx(logprobs_of(expected), abs=1e-3)
    assert cluster.hub.copied == 8
    (report,) = cluster.reports
    assert (report.outcome, report.blocks) == ("done", 8)
    assert report.size == 8 * 2 * 3 * 16 * 2 * make_model(family).shape.head_dim * 4
    told = cluster.answers[cluster.d].deltas[request.id][0].prompt
    assert told is not None
    assert told.cached_tokens == 128


def test_the_bytes_of_the_kv_are_the_same() -> None:
    """As they were copied, and still after the generation has used them."""
    copies: list[tuple[int, int]] = []
    cluster = Cluster(lambda: make_engine(token_budget=48))

    def note(source: KvSource, block: int) -> str:
        pulling = cluster.transports[cluster.d].pulls[MOVE]
        copies.append((pulling.slots[block], pulling.into[block]))
        return ""

    cluster.hub.on_copy = note
    cluster.generate(make_submit(1, random_prompt(3, 141), 30))
    assert len(copies) == 8
    ours, theirs = cluster.d.memory, cluster.p.memory
    assert ours is not None
    assert theirs is not None
    for source, target in copies:
        assert [bytes(strip) for strip in ours.views(target)] == [bytes(strip) for strip in theirs.views(source)]
        assert any(any(strip) for strip in ours.views(target))


@pytest.mark.parametrize(("slots", "blocks"), [(30, 8), (8, 8), (5, 5), (1, 1)])
def test_the_tokens_are_the_same_through_host_memory(slots: int, blocks: int) -> None:
    """As on a GPU, where a transport cannot touch a page. What host memory has no room for is computed."""

    def make() -> Engine:
        engine = make_engine(token_budget=48, host_slots=4, staging_slots=slots)
        engine.use_tiers(None)
        return engine

    request = make_submit(1, random_prompt(3, 141), 30, sampling=SAMPLED, seed=5)
    cluster = Cluster(make)
    # The tier and transfers have slots of their own.
    assert cluster.p.stats().kv_host_total == 4
    assert tokens_of(cluster.generate(request)) == tokens_of(alone(make, request))
    assert cluster.hub.copied == blocks
    told = cluster.answers[cluster.d].deltas[request.id][0].prompt
    assert told is not None
    assert told.cached_tokens == blocks * 16
    assert [report.outcome for report in cluster.reports] == ["done" if blocks == 8 else "failed"]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_prompts_of_any_length(length: int) -> None:
    request = make_submit(1, random_prompt(3, length), 10)
    cluster = Cluster(make_engine)
    assert tokens_of(cluster.generate(request)) == tokens_of(alone(make_engine, request))
    assert cluster.hub.copied == length // 16


def test_four_choices() -> None:
    """Each is a generation of its own. The prompt is pulled once."""
    prompt = random_prompt(3, 100)
    requests = [make_submit(number, prompt, 20, sampling=SAMPLED, seed=number) for number in range(4)]
    expected = run(make_engine(), requests)
    cluster = Cluster(make_engine)
    source = KvSource(MOVE, "p")
    run(cluster.p, [make_submit(9, prompt, 1)])
    for request in requests:
        cluster.d.submit(msgspec.structs.replace(request, source=source))
    while cluster.d.has_work or cluster.hub.move():
        cluster.step(cluster.d)
    assert cluster.answers[cluster.d].tokens == expected.tokens
    assert cluster.hub.copied == 6
    cluster.settle()


def _byte_tokenizer() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=260, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["ab"], trainer)
    return tokenizer


def test_with_a_grammar() -> None:
    tokenizer = _byte_tokenizer()
    size, ends = tokenizer.get_vocab_size(), frozenset({0})
    compiler = GrammarCompiler(tokenizer.to_str(), size, ends)

    def make() -> Engine:
        return Engine(EngineConfig(context_length=512, kv_pages=64), make_model("llama"), ends, size, compiler, lambda: 0.0)

    grammar = Grammar("regex", "(ab|ba){4}[a-f]{3,9}")
    request = make_submit(
        1, tokenizer.encode("a prompt that is longer than two blocks of sixteen").ids, 30, grammar=grammar, sampling=SAMPLED
    )
    expected = alone(make, request)
    cluster = Cluster(make)
    assert tokens_of(cluster.generate(request)) == tokens_of(expected)
    assert cluster.hub.copied == 3
    for engine in (cluster.p, cluster.d):
        engine.close()


def test_prompt_logprobs_are_computed_by_the_first_engine() -> None:
    request = make_submit(1, random_prompt(3, 50), 10, prompt_logprobs=True, logprobs=1)
    expected = alone(make_engine, request)
    cluster = Cluster(make_engine)
    made = cluster.generate(request)
    assert tokens_of(made) == tokens_of(expected)
    first, wanted = made[0].prompt, expected[0].prompt
    assert first is not None
    assert wanted is not None
    assert first.logprobs is not None
    assert first.logprobs == wanted.logprobs
    assert cluster.hub.copied == 3


def test_a_generation_with_prompt_logprobs_computes_even_what_could_be_pulled() -> None:
    prompt = random_prompt(3, 50)
    cluster = Cluster(make_engine)
    run(cluster.p, [make_submit(9, prompt, 1)])
    request = make_submit(1, prompt, 5, prompt_logprobs=True, source=KvSource(MOVE, "p"))
    cluster.answers[cluster.d] = run(cluster.d, [request])
    assert cluster.hub.copied == 0
    assert cluster.answers[cluster.d].tokens == run(make_engine(), [request]).tokens


def test_a_session_leases_what_was_pulled() -> None:
    request = make_submit(1, random_prompt(3, 50), 10, session=SessionTurn("s", "open"))
    cluster = Cluster(make_engine)
    assert tokens_of(cluster.generate(request)) == tokens_of(alone(make_engine, request))
    assert cluster.d.stats().kv_blocks_leased == 3
    assert cluster.p.stats().kv_blocks_leased == 0


def test_pulled_pages_are_not_wiped() -> None:
    """Blocks arrive between two steps. The next one wipes pages of others, and none of these."""
    prompt = random_prompt(3, 141)
    cluster = Cluster(make_engine)
    run(cluster.p, [make_submit(9, prompt, 1)])
    cluster.d.transfers.fetch(Fetch(KvSource(MOVE, "p"), tuple(prompt), 5.0))
    cluster.d.submit(make_submit(2, random_prompt(4, 60), 5))
    cluster.step(cluster.d)
    cluster.move()
    cluster.move()
    cluster.d.submit(make_submit(3, random_prompt(5, 60), 5))
    cluster.step(cluster.d)
    request = make_submit(1, prompt, 20)
    assert tokens_of(alone(make_engine, request)) == run(cluster.d, [request]).tokens[request.id]
    assert cluster.hub.copied == 8


def test_pages_that_arrive_during_a_step_are_not_wiped() -> None:
    """The import begins in a step, and the transport is done before that step wipes the pages of others."""
    prompt = random_prompt(3, 141)
    cluster = Cluster(make_engine)
    run(cluster.p, [make_submit(9, prompt, 1)])
    cluster.hub.is_eager = True
    request = make_submit(1, prompt, 20, source=KvSource(MOVE, "p"))
    expected = alone(make_engine, msgspec.structs.replace(request, source=None))
    assert run(cluster.d, [request, make_submit(2, random_prompt(4, 60), 5)]).tokens[request.id] == tokens_of(expected)
    assert cluster.hub.copied == 8


def lose_prefill(cluster: Cluster) -> None:
    """It dies: nobody can pull from it, and what it has told is worth nothing."""
    cluster.hub.transports.pop("p", None)


def corrupt(cluster: Cluster) -> None:
    cluster.hub.on_copy = lambda source, block: "a block is damaged"


def evict(cluster: Cluster) -> None:
    """The source needs its pages for something else."""
    if cluster.is_prefill_alive and generation_id(50) not in cluster.answers[cluster.p].tokens:
        cluster.p.submit(make_submit(50, random_prompt(50, 200), 1))


def crowd(cluster: Cluster) -> None:
    """The target is busy with others, so that pages are short."""
    for number in range(60, 63):
        cluster.d.submit(make_submit(number, random_prompt(number, 60), 60))


def end_early(cluster: Cluster) -> None:
    cluster.d.transfers.end(MOVE)


@pytest.mark.parametrize("at", [0, 2, 5, 8, 11, 14])
@pytest.mark.parametrize("fault", [lose_prefill, corrupt, evict, crowd, end_early])
def test_a_fault_at_any_time_changes_no_token(fault: Callable[[Cluster], None], at: int) -> None:
    def make() -> Engine:
        return make_engine(token_budget=32, kv_pages=18)

    request = make_submit(1, random_prompt(3, 141), 12, sampling=SAMPLED, seed=8)
    cluster = Cluster(make, lambda cluster, event: fault(cluster) if event == at else None)
    assert tokens_of(cluster.generate(request, most=2000)) == tokens_of(alone(make, request))
    run(cluster.d, [])


@pytest.mark.parametrize("at", [1, 5, 9, 13])
@pytest.mark.parametrize("fault", [lose_prefill, corrupt, evict, crowd, end_early])
def test_a_fault_at_any_time_changes_no_token_through_host_memory(fault: Callable[[Cluster], None], at: int) -> None:
    def make() -> Engine:
        return make_engine(token_budget=32, kv_pages=18, staging_slots=12)

    request = make_submit(1, random_prompt(3, 141), 12, sampling=SAMPLED, seed=8)
    cluster = Cluster(make, lambda cluster, event: fault(cluster) if event == at else None)
    assert tokens_of(cluster.generate(request, most=2000)) == tokens_of(alone(make, request))
    run(cluster.d, [])


@pytest.mark.parametrize("slots", [0, 12])
@pytest.mark.parametrize("at", range(0, 22, 2))
def test_a_cancel_at_any_time_leaves_nothing(at: int, slots: int) -> None:
    request = make_submit(1, random_prompt(3, 141), 12)

    def make() -> Engine:
        return make_engine(token_budget=32, staging_slots=slots)

    cluster = Cluster(make, lambda cluster, event: cluster.cancel(request) if event == at else None)
    cluster.generate(request)


def test_a_preemption_while_an_import_runs() -> None:
    """The target preempts its newest generation for the oldest, while the pages of an import fill."""
    prompt = random_prompt(3, 60)
    cluster = Cluster(lambda: make_engine(kv_pages=18))
    run(cluster.p, [make_submit(9, prompt, 1)])
    others = [make_submit(number, random_prompt(number, 70), 60) for number in (60, 61)]
    for other in others:
        cluster.d.submit(other)
    cluster.step(cluster.d)
    request = make_submit(1, prompt, 12, source=KvSource(MOVE, "p"))
    cluster.d.submit(request)
    while cluster.d.has_work:
        cluster.step(cluster.d)
    while request.id not in cluster.answers[cluster.d].terminals:
        cluster.move()
        cluster.step(cluster.d)
    assert cluster.d.stats().preemptions
    expected = run(make_engine(), [*others, msgspec.structs.replace(request, source=None)])
    assert cluster.answers[cluster.d].tokens == expected.tokens
    cluster.settle()


def test_the_rate_of_prompts_is_measured() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.25
        return now[0]

    engine = make_engine(clock=clock, token_budget=128)
    run(engine, [make_submit(1, random_prompt(3, 30), 20)])
    assert engine.stats().prefill_rate == 0.0, "too few tokens to measure"
    engine.submit(make_submit(2, random_prompt(4, 128), 1))
    engine.step()
    assert 0 < engine.stats().prefill_rate <= 128 / 0.25
    assert engine.stats().tokens_to_compute == 0
    engine.submit(make_submit(3, random_prompt(5, 200), 1))
    assert engine.stats().tokens_to_compute == 200
    engine.step()
    assert engine.stats().tokens_to_compute == 72


def test_the_fingerprint_says_what_gives_kv_its_meaning() -> None:
    same = make_engine("llama").fingerprint()
    assert same == make_engine("llama", kv_pages=99).fingerprint()
    assert len(same) == 16
    others = [
        make_engine("qwen3"),
        make_engine("qwen2"),
        make_engine("llama", page_size=32),
        make_engine("llama", reproducible=True),
        make_engine(make_model("llama", 2048)),
        make_engine(changed_model()),
        make_engine(mended_model()),
        *[make_engine(stretched_model(factor)) for factor in (1.0, 1.1)],
    ]
    assert len({same, *[engine.fingerprint() for engine in others]}) == len(others) + 1


def stretched_model(attention_factor: float) -> Model:
    """The same weights and frequencies: positions turn queries and keys into longer ones."""
    made = make_model("llama")
    rope = RopeScaling("yarn", 2.0, attention_factor=attention_factor)
    return Model(dataclasses.replace(made.shape, rope=rope), reference("llama").state_dict().items(), 512, made.dtype, made.device)


def mended_model() -> Model:
    """The same weights, but for one number of one token's vector."""
    made = make_model("llama")
    weights = {name: tensor.clone() for name, tensor in reference("llama").state_dict().items()}
    weights["model.embed_tokens.weight"][77, 3] += 0.01
    return Model(made.shape, weights.items(), 512, made.dtype, made.device)


def changed_model() -> Model:
    """The same sizes, and one matrix that was trained further."""
    made = make_model("llama")
    weights = {name: tensor.clone() for name, tensor in reference("llama").state_dict().items()}
    weights["model.layers.1.mlp.down_proj.weight"] *= 1.001
    return Model(made.shape, weights.items(), 512, made.dtype, made.device)
