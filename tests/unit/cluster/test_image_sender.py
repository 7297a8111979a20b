"""What a front end answers to a worker that wants images, and when it stops."""

from __future__ import annotations

import asyncio

from penstock.cluster.links.images import MAX_UNANSWERED_PINGS, PIECES_PER_PING, AnswerImage, ImageAnswer, ImageSender, answer_with_pixels
from penstock.media.picture import Picture
from penstock.wire.errors import LinkBroken
from penstock.wire.images import ImageLayout, ImageSpan, image_ids
from penstock.wire.messages import (
    IMAGE_PIECE_BYTES,
    ImagePiece,
    ImageRefused,
    ImageSource,
    ImagesWanted,
    KvSource,
    Message,
    Submit,
)
from simulated_pictures import sealed_name

FIRST, SECOND = b"1" * 16, b"2" * 16
SIZE = (1024, 1024)
PIECES = 3 * 1024 * 1024 // IMAGE_PIECE_BYTES
ON_THE_WAY = PIECES_PER_PING * MAX_UNANSWERED_PINGS


def picture(colour: int) -> Picture:
    pixels = bytes([colour]) * (3 * SIZE[0] * SIZE[1])
    return Picture(ImageLayout(sealed_name(bytes([colour] * 16), SIZE, pixels), (2,), (1, 2), SIZE), SIZE, pixels)


CAT, DOG = picture(1), picture(2)
PICTURES = {each.name: each for each in (CAT, DOG)}


def request(identity: bytes, *pictures: Picture) -> Submit:
    spans = tuple([ImageSpan(each.name, 2 * index, 2 * index + 2, (1, 2), SIZE) for index, each in enumerate(pictures)])
    return Submit(identity, sum([image_ids(each.name, 2) for each in pictures], ()), 5, 1, images=spans)


class Link:
    """A link on which the test says what was read."""

    def __init__(self, answer: AnswerImage | None = None) -> None:
        self.with_images = {each.id: each for each in (request(FIRST, CAT, DOG), request(SECOND, CAT))}
        self.answer_image: AnswerImage = answer or answer_with_pixels(PICTURES.get)
        self.pings = self.pongs = self.silent_ticks = 0
        self.sent: list[Message] = []
        self.sender = ImageSender(self)

    def ping(self) -> None:
        self.pings += 1

    def write(self, message: Message) -> None:
        self.sent.append(message)

    def pong(self) -> None:
        self.pongs += 1
        self.sender.ponged.set()

    def end(self, generation: bytes) -> None:
        del self.with_images[generation]
        self.sender.forget(generation)

    async def read_all(self) -> None:
        """The worker reads until nothing more comes."""
        await turns()
        while self.pongs < self.pings:
            self.pong()
            await turns()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_image_is_sent_in_pieces_and_a_slow_worker_holds_them_up() -> None:
    link = Link()
    link.sender.want(ImagesWanted(FIRST, (CAT.name,)))
    await turns()
    assert len(link.sent) == ON_THE_WAY
    link.silent_ticks = 3
    link.pong()
    await turns()
    assert len(link.sent) == ON_THE_WAY + PIECES_PER_PING
    assert link.silent_ticks == 0, "a worker that reads an image is not silent"
    await link.read_all()
    pieces = [piece for piece in link.sent if isinstance(piece, ImagePiece)]
    assert len(pieces) == len(link.sent) == PIECES
    assert {(piece.name, piece.total, piece.size) for piece in pieces} == {(CAT.name, len(CAT.pixels), SIZE)}
    assert b"".join([piece.data for piece in pieces]) == CAT.pixels


async def test_one_image_is_sent_after_the_other_and_each_once() -> None:
    link = Link()
    link.sender.want(ImagesWanted(FIRST, (CAT.name, DOG.name)))
    link.sender.want(ImagesWanted(SECOND, (CAT.name,)))
    await link.read_all()
    names = [piece.name for piece in link.sent if isinstance(piece, ImagePiece)]
    assert names == [CAT.name] * PIECES + [DOG.name] * PIECES


async def test_an_image_stops_when_the_last_that_wants_it_has_ended() -> None:
    link = Link()
    link.sender.want(ImagesWanted(FIRST, (CAT.name,)))
    link.sender.want(ImagesWanted(SECOND, (CAT.name,)))
    await turns()
    link.end(FIRST)
    link.pong()
    await turns()
    sent = len(link.sent)
    assert sent > ON_THE_WAY
    link.end(SECOND)
    await link.read_all()
    assert len(link.sent) == sent
    # It can be asked for again, from its start.
    link.with_images[SECOND] = request(SECOND, CAT)
    link.sender.want(ImagesWanted(SECOND, (CAT.name,)))
    await link.read_all()
    assert len(link.sent) == sent + PIECES


async def test_one_that_stops_lets_the_next_begin() -> None:
    link = Link()
    link.with_images[FIRST] = request(FIRST, DOG)
    link.sender.want(ImagesWanted(SECOND, (CAT.name,)))
    link.sender.want(ImagesWanted(FIRST, (DOG.name,)))
    await turns()
    link.end(SECOND)
    await link.read_all()
    pieces = [piece for piece in link.sent if isinstance(piece, ImagePiece)]
    assert [piece.name for piece in pieces[ON_THE_WAY:]] == [DOG.name] * PIECES


async def test_a_worker_gets_no_image_of_another_generation() -> None:
    """Not even if the front end has it."""
    link = Link()
    link.sender.want(ImagesWanted(SECOND, (DOG.name,)))
    link.sender.want(ImagesWanted(b"3" * 16, (CAT.name,)))
    await turns()
    assert link.sent == [ImageRefused(DOG.name, "the generation has no such image", retryable=False)]


async def test_an_image_that_is_gone_is_refused() -> None:
    link = Link(answer_with_pixels(lambda _: None))
    link.sender.want(ImagesWanted(SECOND, (CAT.name,)))
    await turns()
    assert link.sent == [ImageRefused(CAT.name, "the front end no longer has it", retryable=False)]


async def test_another_worker_may_compute_it_and_the_answer_is_cancelled_with_the_generation() -> None:
    source, told, ended = KvSource(b"t" * 16, "unix:/encoder"), list[tuple[bytes, bytes, str]](), list[bytes]()
    is_found = asyncio.Event()

    async def answer(submit: Submit, span: ImageSpan, failed: str) -> ImageAnswer:
        told.append((submit.id, span.name, failed))
        try:
            await is_found.wait()
        finally:
            ended.append(span.name)
        return source

    link = Link(answer)
    link.sender.want(ImagesWanted(FIRST, (DOG.name,), "it has died"))
    link.sender.want(ImagesWanted(SECOND, (CAT.name,)))
    await turns()
    assert told == [(FIRST, DOG.name, "it has died"), (SECOND, CAT.name, "")]
    link.end(SECOND)
    await turns()
    assert (link.sent, ended) == ([], [CAT.name])
    is_found.set()
    await turns()
    assert link.sent == [ImageSource(DOG.name, source)]


async def test_an_error_of_ours_is_a_refusal_and_not_silence() -> None:
    async def answer(_: Submit, __: ImageSpan, ___: str) -> ImageAnswer:
        raise LinkBroken("the encode worker is gone")

    link = Link(answer)
    link.sender.want(ImagesWanted(SECOND, (CAT.name,)))
    await turns()
    assert link.sent == [ImageRefused(CAT.name, "LinkBroken in the front end")]


async def test_nothing_is_left_of_a_link_that_is_lost() -> None:
    link = Link()
    link.sender.want(ImagesWanted(FIRST, (CAT.name, DOG.name)))
    await turns()
    before = len(asyncio.all_tasks())
    link.sender.close()
    await turns()
    assert len(asyncio.all_tasks()) == before - 2
