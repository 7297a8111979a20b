"""Prompts with images in the embedded engine: token for token those of transformers, however they are cut, moved and mixed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from image_engine import ImageEngine, chat, expected_tokens
from moving import Hub
from penstock.kv.features import ANSWER_SECONDS
from penstock.kv.moving import SlotMemory
from penstock.wire.codec import unpack_logprobs
from penstock.wire.images import ImageSpan, image_ids, is_image_id
from penstock.wire.messages import Export, Fault, Fetch, Finish, ImagesWanted, KvSource, Sampling
from tiny_models import generation_id, make_engine, make_submit
from tiny_vision import KINDS, Kind, VisionPrompt, vision_model

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
FIVE = [(40, 40), (200, 50), (64, 128), (33, 77), (120, 110)]
SIZES = [[], [(96, 64)], [(50, 90), (130, 60)], FIVE]
COUNT = 8


def prompts_of(kind: Kind) -> list[VisionPrompt]:
    return [chat(kind, sizes, seed=10 * index) for index, sizes in enumerate(SIZES)]


@EVERY_KIND
@pytest.mark.parametrize("settings", [{}, {"token_budget": 23}], ids=["batched", "cut through images"])
def test_tokens_are_those_of_transformers(kind: Kind, settings: dict[str, Any]) -> None:
    """0, 1, 2 and 5 images of all sizes, text between them, over two turns, all at once."""
    prompts = prompts_of(kind)
    rig = ImageEngine(vision_model(kind), **settings)
    requests = [rig.submit(number, prompt, COUNT) for number, prompt in enumerate(prompts)]
    rig.run()
    assert [rig.tokens(request) for request in requests] == expected_tokens(prompts, kind, COUNT)
    rig.close()


@EVERY_KIND
def test_a_preempted_prompt_is_computed_again(kind: Kind) -> None:
    prompts, count = [chat(kind, FIVE[:2], seed=seed) for seed in (0, 10)], 40
    pages = sum(-(-len(prompt.token_ids) // 16) for prompt in prompts) + 2
    rig = ImageEngine(vision_model(kind), slots=8, kv_pages=pages)
    requests = [rig.submit(number, prompt, count) for number, prompt in enumerate(prompts)]
    rig.run()
    assert rig.engine.stats().preemptions > 0
    assert [rig.tokens(request) for request in requests] == expected_tokens(prompts, kind, count)
    rig.close()


@EVERY_KIND
def test_images_without_room_for_all_features_are_computed_in_rounds(kind: Kind) -> None:
    prompt = chat(kind, FIVE, seed=30)
    rig = ImageEngine(vision_model(kind), slots={"idefics3": 10, "qwen3_vl": 2}[kind])
    request = rig.submit(1, prompt, COUNT)
    rig.run()
    assert [rig.tokens(request)] == expected_tokens([prompt], kind, COUNT)
    assert rig.engine.stats().images_encoded == len(FIVE)
    assert rig.images.features.evicted
    rig.close()


@EVERY_KIND
def test_a_turn_reuses_what_is_cached_and_encodes_only_what_is_new(kind: Kind) -> None:
    """Also from the middle of an image on: the pages of an image that was cut off by a cancel are used."""
    first, second = chat(kind, FIVE[:2], seed=1), chat(kind, FIVE[:3], seed=1)
    rig = ImageEngine(vision_model(kind), page_size=16)
    rig.submit(1, first, COUNT)
    rig.run()
    request = rig.submit(2, second, COUNT)
    rig.run()
    assert [rig.tokens(request)] == expected_tokens([second], kind, COUNT)
    assert set(rig.asked.values()) == {1}, "an image was asked for twice"
    assert len(rig.asked) == 3
    stats = rig.engine.stats()
    assert (stats.images_encoded, stats.image_positions_to_encode) == (3, 0)
    rig.close()


@EVERY_KIND
def test_a_prefix_that_ends_in_an_image_is_reused(kind: Kind) -> None:
    prompt = chat(kind, [(130, 60)], seed=3)
    span = prompt.spans[0]
    rig = ImageEngine(vision_model(kind), token_budget=16)
    request = rig.submit(1, prompt, COUNT)
    rig.step()
    while rig.images.is_encoding:
        assert rig.news.wait(30)
        rig.images.poll()
    for _ in range(span.start // 16 + 1):
        rig.step()
    rig.engine.cancel(request.id)
    again = rig.submit(2, prompt, COUNT)
    rig.run()
    report = rig.collected.deltas[again.id][0].prompt
    assert report is not None
    assert span.start < report.cached_tokens < span.end, "the prefix ends in the image"
    assert [rig.tokens(again)] == expected_tokens([prompt], kind, COUNT)
    assert rig.engine.stats().images_encoded == 1
    rig.close()


@EVERY_KIND
def test_another_engine_continues(kind: Kind) -> None:
    """Migrated in the middle of the answer, to an engine that knows nothing, and to one that has a part of the prompt."""
    prompt = chat(kind, FIVE[:2], seed=5)
    (expected,) = expected_tokens([prompt], kind, COUNT)
    for known in (0, 1, 5):
        rig = ImageEngine(vision_model(kind), token_budget=40)
        if known == 5:
            rig.submit(9, chat(kind, FIVE[:1], seed=5), 1)
            rig.run()
        rig.knows(prompt)
        tokens = (*prompt.token_ids, *expected[:known])
        request = make_submit(1, tokens, COUNT, offset=known, images=prompt.spans)
        rig.engine.submit(request)
        rig.run()
        assert rig.tokens(request) == expected[known:]
        rig.close()


@EVERY_KIND
def test_two_pictures_of_the_same_size_share_no_block(kind: Kind) -> None:
    prompts = [chat(kind, [(96, 64)], seed=seed) for seed in (1, 2)]
    rig = ImageEngine(vision_model(kind))
    requests = []
    for number, prompt in enumerate(prompts):
        requests.append(rig.submit(number, prompt, COUNT))
        rig.run()
    reports = [rig.collected.deltas[request.id][0].prompt for request in requests]
    assert reports[1] is not None
    assert reports[1].cached_tokens <= prompts[0].spans[0].start
    assert [rig.tokens(request) for request in requests] == expected_tokens(prompts, kind, COUNT)
    assert rig.tokens(requests[0]) != rig.tokens(requests[1]), "the model does not see its picture"
    rig.close()


@EVERY_KIND
def test_kv_of_images_goes_to_host_memory_and_comes_back(kind: Kind) -> None:
    prompts = [chat(kind, FIVE[:2], seed=seed) for seed in (1, 20, 40)]
    pages = -(-max(len(prompt.token_ids) for prompt in prompts) // 16) + 2
    rig = ImageEngine(vision_model(kind), kv_pages=pages, host_slots=4 * pages)
    rig.engine.use_tiers(None)
    # Computing is slow, so that loading is worth it.
    rig.engine.prefill_rate.measure(1000, 100.0, 0.0)
    for number, prompt in enumerate([*prompts, *prompts]):
        request = rig.submit(number, prompt, COUNT)
        rig.run()
        assert [rig.tokens(request)] == expected_tokens([prompt], kind, COUNT)
    assert rig.engine.stats().kv_tier_events["host loaded"] > 0
    rig.close()


class DirectKv:
    """A `kv.moving.KvEngine` in the thread of its engine."""

    def __init__(self, rig: ImageEngine) -> None:
        assert rig.engine.memory is not None
        self.moves = rig.engine.moves
        self.fingerprint = rig.engine.fingerprint()
        self.memory: SlotMemory = rig.engine.memory
        self.connect = rig.engine.connect
        self.export, self.release = self.moves.export, self.moves.release
        self.arrived, self.pull_ended = self.moves.arrived, self.moves.pull_ended


@EVERY_KIND
def test_a_prompt_with_images_that_another_engine_computes(kind: Kind) -> None:
    """Its KV moves, and the engine that continues asks for no image."""
    prompt, move = chat(kind, FIVE[:2], seed=5), (77).to_bytes(16)
    (expected,) = expected_tokens([prompt], kind, COUNT)
    hub = Hub()
    source, target = [ImageEngine(vision_model(kind), token_budget=64) for _ in "pd"]
    for address, rig in (("p", source), ("d", target)):
        kv = DirectKv(rig)
        kv.connect(hub.add(address, kv))
    place = KvSource(move, "p", waits=True)
    first = source.submit(1, prompt, 1, export=Export(move, 5.0))
    target.engine.transfers.fetch(Fetch(place, prompt.token_ids, 5.0))
    while first.id not in source.collected.terminals:
        source.step()
        if source.images.is_encoding:
            source.news.wait(30)
        target.step()
        hub.move()
    tokens = (*prompt.token_ids, *source.tokens(first))
    rest = make_submit(1, tokens, COUNT, offset=1, images=prompt.spans, source=place)
    target.engine.submit(rest)
    while rest.id not in target.collected.terminals:
        target.step()
        hub.move()
    assert source.tokens(first) + target.tokens(rest) == expected
    last_block = len(tokens) // 16 * 16
    if all(span.end <= last_block for span in prompt.spans):
        assert not target.asked, "the KV of all images has moved"
    source.close()
    target.close()


@EVERY_KIND
def test_penalties_and_logprobs_pass_over_positions_of_images(kind: Kind) -> None:
    prompt = chat(kind, [(96, 64)], seed=4)
    rig = ImageEngine(vision_model(kind))
    sampling = Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)
    request = rig.submit(1, prompt, COUNT, sampling=sampling, prompt_logprobs=True, logprobs=2)
    rig.run()
    assert rig.collected.terminals[request.id] == Finish("length")
    report = rig.collected.deltas[request.id][0].prompt
    assert report is not None
    assert report.logprobs is not None
    found = [entry for piece in report.logprobs for entry in unpack_logprobs(piece)]
    assert [entry is None for entry in found] == [index == 0 or is_image_id(token) for index, token in enumerate(prompt.token_ids)]
    rig.close()


class TestFailures:
    """A failure of one image ends the generations that need it, and nobody else."""

    KIND: Kind = "qwen3_vl"

    def rig(self, **settings: Any) -> tuple[ImageEngine, VisionPrompt, VisionPrompt]:
        rig = ImageEngine(vision_model(self.KIND), **settings)
        return rig, chat(self.KIND, [(96, 64)], seed=1), chat(self.KIND, [(50, 90)], seed=2)

    def run(self, rig: ImageEngine, bad: VisionPrompt, good: VisionPrompt) -> Fault:
        failing, fine = rig.submit(1, bad, COUNT), rig.submit(2, good, COUNT)
        rig.run()
        assert [rig.tokens(fine)] == expected_tokens([good], self.KIND, COUNT)
        fault = rig.collected.terminals[failing.id]
        assert isinstance(fault, Fault)
        assert rig.engine.stats().image_positions_to_encode == 0
        rig.close()
        return fault

    def test_pixels_that_do_not_fit(self) -> None:
        rig, bad, good = self.rig()
        rig.knows(bad)
        rig.pixels[bad.images[0].name] = b"short"
        broken = VisionPrompt(bad.inputs, bad.token_ids, bad.spans, ())
        assert not self.run(rig, broken, good).retryable

    @pytest.mark.parametrize("error", [MemoryError("full"), RuntimeError("a kernel failed"), torch.OutOfMemoryError("full")])
    def test_a_tower_that_fails(self, error: Exception) -> None:
        def fail(pixels: bytes, made: torch.Tensor) -> torch.Tensor:
            if pixels == bad.images[0].pixels:
                raise error
            return made

        rig, bad, good = self.rig(spoil=fail)
        fault = self.run(rig, bad, good)
        assert fault.retryable
        assert fault.code == "image_lost"

    def test_features_that_are_not_numbers(self) -> None:
        _, bad, _ = self.rig()
        rig, _, good = self.rig(spoil=lambda pixels, made: made * torch.nan if pixels == bad.images[0].pixels else made)
        fault = self.run(rig, bad, good)
        assert fault.code == "image_lost", "not a fault of the text model"
        assert "not numbers" in fault.message
        assert rig.images.maker.store.memory.tensor.view(torch.float32).isfinite().all(), "they are in a slot"

    def test_a_tower_that_makes_too_much(self) -> None:
        _, bad, _ = self.rig()
        rig, _, good = self.rig(spoil=lambda pixels, made: made.repeat(9, 1) if pixels == bad.images[0].pixels else made)
        assert "do not fill" in self.run(rig, bad, good).message

    def test_a_front_end_that_has_it_no_more(self) -> None:
        rig, bad, good = self.rig()

        def answer(wanted: ImagesWanted) -> None:
            for name in wanted.names:
                if name == bad.images[0].name:
                    rig.images.features.refuse(name, "the client has left", retryable=True)
                else:
                    rig.images.add_pixels(name, rig.pixels[name])

        rig.answer = answer
        assert "the client has left" in self.run(rig, bad, good).message

    def test_a_front_end_that_says_nothing(self) -> None:
        clock = Clock()
        rig, bad, _ = self.rig(clock=clock)
        rig.answer = lambda _: None
        request = rig.submit(1, bad, COUNT)
        rig.step()
        assert not rig.engine.has_work
        assert rig.engine.next_expiry == ANSWER_SECONDS
        clock.now = ANSWER_SECONDS
        rig.step()
        assert isinstance(rig.collected.terminals[request.id], Fault)
        rig.close()

    @pytest.mark.parametrize("phase", ["asked", "encoding", "running"])
    def test_a_cancel(self, phase: str) -> None:
        rig, prompt, good = self.rig(token_budget=16)
        if phase == "asked":
            rig.answer = lambda _: None
        request = rig.submit(1, prompt, COUNT)
        rig.step()
        if phase == "running":
            while not rig.engine.has_work:
                assert rig.news.wait(30)
            rig.step()
        rig.engine.cancel(request.id)
        rig.answer = rig.send
        other = rig.submit(2, good, COUNT)
        rig.run()
        assert request.id not in rig.collected.terminals
        assert [rig.tokens(other)] == expected_tokens([good], self.KIND, COUNT)
        rig.close()

    def test_requests_that_can_never_run(self) -> None:
        rig, _, _ = self.rig(slots=1)
        prompt = chat(self.KIND, [(200, 200)])
        name = b"n" * 16
        ids = image_ids(name, 10)
        wrong = [
            (ids, ImageSpan(name, 0, 10, (3, 3), (8, 8)), "10 positions: expected 9"),
            (ids, ImageSpan(name, 0, 10, (-1, -10), (8, 8)), "10 positions"),
            (ids[:9], ImageSpan(name, 0, 10, (2, 5), (8, 8)), "image 0"),
            ((*ids[:9], ids[0]), ImageSpan(name, 0, 10, (2, 5), (8, 8)), "do not carry its name"),
            (prompt.token_ids, prompt.spans[0], "--image-memory"),
        ]
        for number, (tokens, span, reason) in enumerate(wrong):
            rig.engine.submit(make_submit(number, tokens, COUNT, images=(span,)))
            rig.run()
            fault = rig.collected.terminals[generation_id(number)]
            assert isinstance(fault, Fault)
            assert reason in fault.message
        rig.close()

    def test_a_model_for_text_refuses_images(self) -> None:
        prompt = chat(self.KIND, [(96, 64)])
        engine = make_engine()
        engine.submit(make_submit(1, prompt.token_ids, COUNT, images=prompt.spans))
        (segment,) = engine.step()
        assert isinstance(segment.terminal, Fault)
        assert "reads only text" in segment.terminal.message


def test_kv_moves_only_between_workers_with_the_same_tower() -> None:
    """The KV of an image's positions depends on what has made its features."""
    one, same, other = [ImageEngine(vision_model("qwen3_vl")) for _ in range(3)]
    other.images.maker.fingerprint = b"another tower"
    assert one.engine.fingerprint() == same.engine.fingerprint()
    assert one.engine.fingerprint() != other.engine.fingerprint()
    for rig in (one, same, other):
        rig.close()


def test_features_of_many_prompts_stay_within_their_memory() -> None:
    """More prompts with an image each than there is room for features, all at once."""
    kind: Kind = "qwen3_vl"
    one = chat(kind, [(96, 64)])
    span = one.spans[0]
    rig = ImageEngine(vision_model(kind), slots=6 * -(-(span.grid[0] * span.grid[1]) // 16), kv_pages=512, token_budget=512)
    for number in range(100):
        name = number.to_bytes(16)
        ids = image_ids(name, span.grid[0] * span.grid[1])
        tokens = (*one.token_ids[: span.start], *ids, *one.token_ids[span.end :])
        rig.pixels[name] = one.images[0].pixels
        images = (msgspec.structs.replace(span, name=name),)
        rig.engine.submit(make_submit(number, tokens, 1, images=images))
    held: list[int] = []
    send = rig.send

    def answer(wanted: ImagesWanted) -> None:
        held.append(rig.images.features.used)
        send(wanted)

    rig.answer = answer
    rig.run(20_000)
    assert max(held) == rig.images.features.slots
    assert len(rig.collected.terminals) == 100
    assert rig.engine.stats().images_encoded == 100
    assert len({tuple(tokens) for tokens in rig.collected.tokens.values()}) == 1, "the same picture, and another answer"
    rig.close()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
