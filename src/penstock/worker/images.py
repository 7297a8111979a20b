"""The images that a backend waits for: which front end was asked, and what has come."""

from __future__ import annotations

import logging
from typing import Protocol

from penstock.wire.errors import FrameMalformed
from penstock.wire.images import MAX_IMAGE_BYTES, SEAL_BYTES, seal_of
from penstock.wire.messages import ImagePiece, ImageRefused, ImagesWanted, Message
from penstock.worker.backend import Backend

log = logging.getLogger(__name__)


class Port(Protocol):
    """A front end that can be asked."""

    name: str

    def announce(self, message: Message) -> None: ...


class _Wanted:
    """One image. `askers` are the generations that wait for it, in order. Their front ends are asked one after the other: `asked` is the
    generation in whose name that was done last, and `refusals` has those that do not have it."""

    def __init__(self) -> None:
        self.askers: dict[bytes, Port] = {}
        self.asked = b""
        self.refusals: list[Port] = []

    @property
    def next_asker(self) -> bytes | None:
        return next((generation for generation, port in self.askers.items() if port not in self.refusals), None)


class _Partial:
    """The pieces of one image, as far as they have come."""

    def __init__(self, piece: ImagePiece) -> None:
        self.name, self.size, self.total = piece.name, piece.size, piece.total
        self.pieces: list[bytes] = []
        self.length = 0
        self.seal = seal_of(piece.size)

    def add(self, piece: ImagePiece) -> bool:
        """Returns whether the image is complete. Raises FrameMalformed for a piece that does not continue it."""
        expected = self.name, self.length, self.total, self.size
        if (piece.name, piece.offset, piece.total, piece.size) != expected or not 0 < len(piece.data) <= self.total - self.length:
            raise FrameMalformed(
                f"{len(piece.data):,} bytes at {piece.offset:,} of {piece.total:,} of image {piece.name.hex()}: expected the next ones at "
                f"{self.length:,} of {self.total:,} of {self.name.hex()}"
            )
        self.pieces.append(piece.data)
        self.seal.update(piece.data)
        self.length += len(piece.data)
        return self.length == self.total


class WantedImages:
    """Asks one front end at a time for each image, however many generations wait for it. If that front end leaves or does not have the
    image, asks another one.

    A front end sends one image after the other, so at most one incomplete image per front end is held here. An image that nobody waits
    for any more is dropped: the front end may learn too late. A front end that breaks these rules loses its link.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._wanted: dict[bytes, _Wanted] = {}
        self._partials: dict[Port, _Partial] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, wanted: ImagesWanted, port: Port) -> None:
        """The backend needs these images for a generation of this front end."""
        for name in wanted.names:
            self._wanted.setdefault(name, _Wanted()).askers[wanted.generation] = port
        new = tuple([name for name in wanted.names if not self._wanted[name].asked])
        for name in new:
            self._wanted[name].asked = wanted.generation
        if new:
            port.announce(ImagesWanted(wanted.generation, new, wanted.failed))

    def forget(self, generation: bytes) -> None:
        """This generation has ended: what it asked for is asked for in the name of another that waits for it."""
        for name, wanted in list(self._wanted.items()):
            wanted.askers.pop(generation, None)
            if not wanted.askers:
                del self._wanted[name]
            elif wanted.asked == generation:
                self._ask_next(name, wanted)

    def left(self, port: Port) -> None:
        """A front end is gone. Its generations have been forgotten."""
        self._partials.pop(port, None)

    def take_piece(self, port: Port, piece: ImagePiece) -> None:
        """Raises FrameMalformed for a piece that does not continue the last one, and for an image that no model wants."""
        partial = self._partials.get(port)
        if piece.offset == 0 or partial is None:
            _check(piece)
            partial = self._partials[port] = _Partial(piece)
        if partial.add(piece):
            del self._partials[port]
            if partial.seal.digest() != piece.name[-SEAL_BYTES:]:
                log.error("front end %s has sent other pixels than image %s has", port.name, piece.name.hex())
                self.refuse(port, ImageRefused(piece.name, "the front end has other pixels under its name"))
            elif self._is_asked(port, piece.name):
                # Only from the one that was asked: another may have been asked before, and have gone on.
                del self._wanted[piece.name]
                self._backend.image(piece.name, piece.size, b"".join(partial.pieces))

    def take_answer(self, port: Port, name: bytes) -> bool:
        """A front end has answered in another way than with pixels. Returns whether somebody waits for that."""
        return self._is_asked(port, name) and self._wanted.pop(name) is not None

    def refuse(self, port: Port, message: ImageRefused) -> None:
        """A front end does not have it. If nobody else can be asked, those that wait for it fail."""
        if self._is_asked(port, message.name):
            wanted = self._wanted[message.name]
            wanted.refusals.append(port)
            self._ask_next(message.name, wanted, message)

    def _is_asked(self, port: Port, name: bytes) -> bool:
        wanted = self._wanted.get(name)
        return wanted is not None and wanted.askers[wanted.asked] is port

    def _ask_next(self, name: bytes, wanted: _Wanted, refusal: ImageRefused | None = None) -> None:
        generation = wanted.next_asker
        if generation is not None:
            wanted.asked = generation
            wanted.askers[generation].announce(ImagesWanted(generation, (name,)))
            return
        del self._wanted[name]
        refusal = refusal or ImageRefused(name, "no front end has it")
        self._backend.image_refused(name, refusal.reason, retryable=refusal.retryable)


def _check(piece: ImagePiece) -> None:
    """Raises FrameMalformed for the first piece of an image that cannot be."""
    width, height = piece.size
    if min(piece.size) < 1 or piece.total != 3 * width * height or piece.total > MAX_IMAGE_BYTES:
        raise FrameMalformed(
            f"an image of {width} by {height} has {piece.total:,} bytes: expected 3 for each pixel, and at most {MAX_IMAGE_BYTES:,}"
        )
