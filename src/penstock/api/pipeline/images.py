"""The images of a chat: read and named, or, for a model that reads only text, refused or replaced by a note."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct, structs

from penstock.api.auth.keys import Tenant
from penstock.api.models import ServedModel
from penstock.media.file import PIECE_CHARACTERS, sent_file
from penstock.media.formats import read_header
from penstock.media.picture import ImageRef, Picture
from penstock.text.encoding import Steps, at_once
from penstock.text.images import IMAGE_MARK, MARK_CHARACTERS, named_mark
from penstock.text.marks import Place
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, Tokenizer
from penstock.wire.errors import RequestError
from penstock.wire.images import FIRST_IMAGE_ID, ImageRules

if TYPE_CHECKING:
    from penstock.api.pipeline.request import PromptContext

TOO_MANY = "too_many_images"
FEW_NOTES = 16
"""Are made at once, if they are short. Looking at a header takes up to half a millisecond, and joining lines 1 ms for each megabyte."""


class PictureReader(Protocol):
    """Reads images: see `media.reader`."""

    @property
    def max_images(self) -> int:
        """The most of a request."""

    def check_number(self, refs: Sequence[ImageRef]) -> None:
        """Raises RequestError, with the code TOO_MANY, when these are too many for a request."""

    async def read(self, refs: Sequence[ImageRef], lane: str, root: bytes, rules: ImageRules, weight: float) -> list[Picture]:
        """The pictures, in order. Raises RequestError that names the field of the image that cannot be read."""

    async def fetch(self, refs: Sequence[ImageRef], lane: str, weight: float, check: Callable[[int], None]) -> dict[str, str]:
        """The files of those that must be fetched, in base64, by their URLs. Raises RequestError as `read` does. `check` gets the bytes of
        all files that have come, with each of them, and may raise."""


class Shown(NamedTuple):
    """A prompt whose images are read, or replaced by notes. `places` are those of the marks for the cache."""

    prompt: ChatPrompt
    places: dict[float, Place]
    pictures: tuple[Picture, ...] = ()


class Images(Struct, frozen=True):
    """The images of one request. `seen` has what stands for those that were looked at, by their index: pictures or notes. None is looked at
    twice, even if several prompts are tried."""

    refs: Sequence[ImageRef]
    seen: dict[int, Picture | str]

    async def show(
        self, prompt: ChatPrompt, places: dict[float, Place], model: ServedModel, tenant: Tenant, root: bytes, context: PromptContext
    ) -> Shown:
        """The prompt with its images. Raises RequestError that names the part that cannot be read, or not by this model."""
        # A stored history may have hundreds of thousands of images: what looks at all of them runs beside the event loop.
        size = sum([len(message["content"]) for message in prompt.messages]) + len(self.refs) * MARK_CHARACTERS
        read = partial(context.transcripts.encoder.read, tenant.lane, size)
        wanted, missing = await read(self._wanted, prompt)
        if missing:
            found: Sequence[Picture | str]
            if model.info.images is None:
                if not context.drops_images and (new := await read(self._first_new)) is not None:
                    raise _unsupported(new, model, context)
                found = await _notes(list(missing.values()), tenant, context)
            else:
                assert context.media is not None, "a front end has a reader of images"
                context.media.check_number(wanted)
                found = await context.media.read(list(missing.values()), tenant.lane, root, model.info.images, tenant.weight)
            await read(self.seen.update, zip(missing, found, strict=True))
        prompt, places, pictures = await read(_replaced, prompt, places, self.seen)
        return Shown(structs.replace(prompt, images={each.name: each.layout for each in pictures}), places, pictures)

    def _wanted(self, prompt: ChatPrompt) -> tuple[list[ImageRef], dict[int, ImageRef]]:
        """The images that are in the prompt; and those of them that were not looked at, by their index."""
        wanted = _indexes(prompt)
        return [self.refs[index] for index in wanted], {index: self.refs[index] for index in wanted if index not in self.seen}

    def _first_new(self) -> ImageRef | None:
        return next((ref for ref in self.refs if not ref.is_old), None)


def _unsupported(shown: ImageRef, model: ServedModel, context: PromptContext) -> RequestError:
    """For an image that a model which reads only text should see."""
    readers = ", ".join(f"`{each.info.name}`" for each in context.models.all() if each.info.images is not None)
    other = f"; these models read images: {readers}" if readers else "; no model at this server reads images"
    message = f"`{shown.field}` is an image: images are not supported by this model, `{model.info.name}`{other}"
    return RequestError(message, param=shown.field, code="unsupported_image")


async def _notes(refs: Sequence[ImageRef], tenant: Tenant, context: PromptContext) -> list[str]:
    """What a model that reads only text gets in place of these."""
    steps = _note_steps(refs)
    is_short = len(refs) <= FEW_NOTES and sum([len(ref.url) + len(ref.data) for ref in refs]) <= PIECE_CHARACTERS
    return at_once(steps) if is_short else await context.transcripts.encoder.run(steps, tenant.lane)


def _note_steps(refs: Sequence[ImageRef]) -> Steps[list[str]]:
    notes = []
    for ref in refs:
        notes.append(note(ref))
        yield
    return notes


def note(ref: ImageRef) -> str:
    """What stands for an image that is neither fetched nor decoded. It depends only on what was sent: prompts keep their prefixes."""
    try:
        file = sent_file(ref)
        header = read_header(file.joined() if file.has_lines else file)
    except (RequestError, ValueError):
        return "[image left out: this model reads only text]"
    return f"[image: {header.width} × {header.height} {header.kind}, left out: this model reads only text]"


def _indexes(prompt: ChatPrompt) -> list[int]:
    """Those of the images that are in the prompt."""
    return [int(mark[1]) for message in prompt.messages for mark in IMAGE_MARK.finditer(message["content"])]


def _replaced(
    prompt: ChatPrompt, places: dict[float, Place], seen: Mapping[int, Picture | str]
) -> tuple[ChatPrompt, dict[float, Place], tuple[Picture, ...]]:
    """The prompt with a text in place of each mark, the places behind the same characters as before, and the prompt's pictures."""
    shown = {index: seen[index] for index in _indexes(prompt)}
    texts = {index: each if isinstance(each, str) else named_mark(each.name) for index, each in shown.items()}

    def filled(content: str) -> str:
        return IMAGE_MARK.sub(lambda mark: texts[int(mark[1])], content)

    moved = {
        seconds: place._replace(characters=len(filled(prompt.messages[place.message]["content"][: place.characters])))
        if place.message < len(prompt.messages)
        else place
        for seconds, place in places.items()
    }
    messages = [ChatMessage({**message, "content": filled(message["content"])}) for message in prompt.messages]
    return structs.replace(prompt, messages=messages), moved, tuple([each for each in shown.values() if not isinstance(each, str)])


def shown_ids(token_ids: Sequence[int], tokenizer: Tokenizer, rules: ImageRules | None) -> Sequence[int]:
    """The ids of a prompt as clients see them: each position of an image as the model's own token for one."""
    if rules is None or not token_ids or max(token_ids) < FIRST_IMAGE_ID:
        return token_ids
    written = tokenizer.encode_part(rules.placeholder)
    # Some write one token for an image, others one between a begin and an end. The simulator writes none.
    placeholder = written[len(written) // 2] if written else tokenizer.end_id
    return [placeholder if token_id >= FIRST_IMAGE_ID else token_id for token_id in token_ids]
