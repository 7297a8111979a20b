"""The images that an engine waits for: whom the worker asks, and what it believes."""

from __future__ import annotations

import pytest

from hand_driven import FIRST, SECOND, HandDriven, Wire, begin, make, say
from penstock.wire.errors import FrameMalformed
from penstock.wire.messages import (
    Cancel,
    Fault,
    ImagePiece,
    ImageRefused,
    ImageSource,
    ImagesWanted,
    KvSource,
    Message,
    Ready,
    Segment,
    Step,
)
from penstock.worker.runtime import FrontEndPort, WorkerRuntime
from simulated_pictures import sealed_name

TRANSFER = b"t" * 16
SIZE = (4, 2)
PIXELS = bytes(range(24))
CAT = sealed_name(b"a cat of one tenant", SIZE, PIXELS)
DOG = sealed_name(b"a dog of one tenant", SIZE, PIXELS[::-1])


def pieces(name: bytes = CAT, pixels: bytes = PIXELS, step: int = 10) -> list[ImagePiece]:
    return [ImagePiece(name, start, len(pixels), SIZE, pixels[start : start + step]) for start in range(0, len(pixels), step)]


def asked(wire: Wire) -> list[ImagesWanted]:
    """What was asked since the last call."""
    found = [message for message in wire.sent if isinstance(message, ImagesWanted)]
    wire.sent = [message for message in wire.sent if not isinstance(message, ImagesWanted)]
    return found


class Two:
    """A worker with two front ends, each with a generation."""

    async def start(self) -> Two:
        self.runtime, self.backend, self.wire, self.port = await make()
        self.other_wire = Wire()
        self.other = self.runtime.attach("the other", self.other_wire)
        self.say(begin(FIRST))
        say(self.runtime, self.other, begin(SECOND))
        return self

    def say(self, *messages: Message) -> None:
        say(self.runtime, self.port, *messages)


async def wanting(*names: bytes) -> tuple[WorkerRuntime, HandDriven, Wire, FrontEndPort]:
    """A worker with two generations of one front end. The first wants images."""
    runtime, backend, wire, port = await make()
    say(runtime, port, begin(FIRST), begin(SECOND))
    backend.want(ImagesWanted(FIRST, names))
    assert asked(wire) == [ImagesWanted(FIRST, names)]
    return runtime, backend, wire, port


async def test_the_owner_of_the_generation_is_asked_and_pieces_are_put_together() -> None:
    runtime, backend, _, port = await wanting(CAT, DOG)
    say(runtime, port, *pieces(DOG, PIXELS[::-1])[:-1])
    assert backend.images == []
    say(runtime, port, pieces(DOG, PIXELS[::-1])[-1], *pieces(step=24))
    assert backend.images == [(DOG, SIZE, PIXELS[::-1]), (CAT, SIZE, PIXELS)]
    assert runtime.wanted_images == 0


async def test_an_image_comes_once_for_all_that_wait_for_it() -> None:
    runtime, backend, wire, port = await wanting(CAT)
    backend.want(ImagesWanted(SECOND, (CAT, DOG)))
    assert asked(wire) == [ImagesWanted(SECOND, (DOG,))]
    say(runtime, port, *pieces())
    assert backend.images == [(CAT, SIZE, PIXELS)]


async def test_when_the_one_in_whose_name_it_was_asked_ends_another_asks() -> None:
    runtime, backend, wire, port = await wanting(CAT)
    backend.want(ImagesWanted(SECOND, (CAT,)))
    say(runtime, port, *pieces()[:1], Cancel((FIRST,)))
    assert asked(wire) == [ImagesWanted(SECOND, (CAT,))]
    # The front end may go on, or begin again.
    say(runtime, port, *pieces()[1:2], *pieces())
    assert backend.images == [(CAT, SIZE, PIXELS)]


async def test_a_generation_that_ends_by_itself_wants_nothing_any_more() -> None:
    runtime, backend, wire, port = await wanting(CAT)
    backend.step(Segment(FIRST, None, Fault("engine_failed", "a test")))
    assert runtime.wanted_images == 0
    say(runtime, port, *pieces())
    assert (backend.images, asked(wire)) == ([], [])


async def test_an_image_of_a_front_end_that_left_comes_from_another() -> None:
    two = await Two().start()
    two.backend.want(ImagesWanted(FIRST, (CAT, DOG)))
    two.backend.want(ImagesWanted(SECOND, (CAT,)))
    assert (len(asked(two.wire)), asked(two.other_wire)) == (1, [])
    two.say(*pieces()[:2])
    two.runtime.detach(two.port)
    assert asked(two.other_wire) == [ImagesWanted(SECOND, (CAT,))]
    assert two.runtime.wanted_images == 1
    say(two.runtime, two.other, *pieces())
    assert two.backend.images == [(CAT, SIZE, PIXELS)]


async def test_what_another_front_end_sends_without_being_asked_is_dropped() -> None:
    two = await Two().start()
    two.backend.want(ImagesWanted(FIRST, (CAT,)))
    two.backend.want(ImagesWanted(SECOND, (CAT,)))
    say(two.runtime, two.other, *pieces(), ImageRefused(CAT, "a lie"), *pieces(DOG, PIXELS[::-1]))
    assert two.backend.images == []
    two.say(*pieces())
    assert two.backend.images == [(CAT, SIZE, PIXELS)]


async def test_one_that_a_front_end_does_not_have_is_asked_of_the_next_and_then_refused() -> None:
    two = await Two().start()
    two.backend.want(ImagesWanted(FIRST, (CAT,)))
    two.backend.want(ImagesWanted(SECOND, (CAT,)))
    two.say(ImageRefused(CAT, "gone", retryable=False))
    assert (two.backend.images, asked(two.other_wire)) == ([], [ImagesWanted(SECOND, (CAT,))])
    say(two.runtime, two.other, ImageRefused(CAT, "gone here too", retryable=False))
    assert two.backend.images == [(CAT, "gone here too", False)]
    assert two.runtime.wanted_images == 0


async def test_the_pixels_of_another_picture_are_refused_whoever_sends_them() -> None:
    two = await Two().start()
    two.backend.want(ImagesWanted(FIRST, (CAT,)))
    two.backend.want(ImagesWanted(SECOND, (CAT,)))
    two.say(*pieces(CAT, PIXELS[::-1]))
    assert (two.backend.images, asked(two.other_wire)) == ([], [ImagesWanted(SECOND, (CAT,))])
    swapped = [ImagePiece(CAT, 0, 24, (2, 4), PIXELS)]
    say(two.runtime, two.other, *swapped)
    assert two.backend.images == [(CAT, "the front end has other pixels under its name", True)]


async def test_another_worker_may_have_the_features() -> None:
    runtime, backend, wire, port = await wanting(CAT)
    source = KvSource(TRANSFER, "unix:/encoder")
    say(runtime, port, ImageSource(CAT, source))
    assert backend.images == [(CAT, source)]
    assert runtime.open_transfers == 1
    # They could not be pulled: the engine asks again, and says why.
    backend.want(ImagesWanted(FIRST, (CAT,), "it has died"))
    assert asked(wire) == [ImagesWanted(FIRST, (CAT,), "it has died")]
    say(runtime, port, *pieces())
    assert backend.images[1:] == [(CAT, SIZE, PIXELS)]
    runtime.detach(port)
    assert backend.ended_transfers == [TRANSFER]


async def test_features_that_nobody_waits_for_are_reported_as_not_pulled() -> None:
    runtime, backend, wire, port = await wanting(CAT)
    say(runtime, port, Cancel((FIRST,)), ImageSource(CAT, KvSource(TRANSFER, "unix:/encoder")))
    say(runtime, port, Ready())
    reports = [report for message in wire.sent if isinstance(message, Step) for report in message.transfers]
    assert (backend.images, [(report.id, report.outcome) for report in reports]) == ([], [(TRANSFER, "failed")])


@pytest.mark.parametrize(
    "wrong",
    [
        [pieces()[1]],
        [pieces()[0], pieces()[2]],
        [pieces()[0], pieces(DOG)[1]],
        [pieces()[0], ImagePiece(CAT, 10, 24, SIZE, PIXELS)],
        [pieces()[0], ImagePiece(CAT, 10, 24, SIZE, b"")],
        [ImagePiece(CAT, 0, 24, SIZE, b"")],
        [ImagePiece(CAT, 0, 25, SIZE, PIXELS)],
        [ImagePiece(CAT, 0, 24, (-4, -2), PIXELS)],
        [ImagePiece(CAT, 0, 3 * 2**30, (2**15, 2**15), PIXELS)],
    ],
)
async def test_a_front_end_that_breaks_the_rules_loses_its_link(wrong: list[ImagePiece]) -> None:
    runtime, backend, _, port = await wanting(CAT, DOG)
    with pytest.raises(FrameMalformed):
        say(runtime, port, *wrong)
    assert backend.images == []


async def test_without_a_question_there_are_no_images() -> None:
    runtime, _, _, port = await make()
    with pytest.raises(FrameMalformed, match="must not send ImagePiece"):
        say(runtime, port, *pieces())
