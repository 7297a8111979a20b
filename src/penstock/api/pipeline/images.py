"""The images of a chat: read and named, or, for a model that reads only text, refused or replaced by a note."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct, structs

from penstock.api.auth.keys import Tenant
from penstock.api.models import ServedModel
from penstock.media.file import PIECE_CHARACTERS, sent_file
from penstock.media.formats import read_header
from penstock.media.picture import ImageRef, Picture
from penstock.text.encoding import Steps, at_once
from penstock.text.images import IMAGE_MARK, named_mark
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
        read = partial(context.transcripts.encoder.read, tenant.lane, sum([len(message["content"]) for message in prompt.messages]))
        wanted = await read(_wanted, prompt)
        if missing := [index for index in wanted if index not in self.seen]:
            refs = [self.refs[index] for index in missing]
            found: Sequence[Picture | str]
            if model.info.images is None:
                found = await self._notes(refs, model, tenant, context)
            else:
                assert context.media is not None, "a front end has a reader of images"
                context.media.check_number([self.refs[index] for index in wanted])
                found = await context.media.read(refs, tenant.lane, root, model.info.images, tenant.weight)
            self.seen.update(zip(missing, found, strict=True))
        shown = {index: self.seen[index] for index in wanted}
        texts = {index: each if isinstance(each, str) else named_mark(each.name) for index, each in shown.items()}
        prompt, places = await read(_replaced, prompt, places, texts)
        pictures = tuple([each for each in shown.values() if not isinstance(each, str)])
        return Shown(structs.replace(prompt, images={each.name: each.layout for each in pictures}), places, pictures)

    async def _notes(self, refs: Sequence[ImageRef], model: ServedModel, tenant: Tenant, context: PromptContext) -> list[str]:
        """What a model that reads only text gets in place of these. Raises RequestError for one that it should see, unless it drops all."""
        shown = None if context.drops_images else next((ref for ref in self.refs if not ref.is_old), None)
        if shown is not None:
            readers = ", ".join(f"`{each.info.name}`" for each in context.models.all() if each.info.images is not None)
            other = f"; these models read images: {readers}" if readers else "; no model at this server reads images"
            message = f"`{shown.field}` is an image: images are not supported by this model, `{model.info.name}`{other}"
            raise RequestError(message, param=shown.field, code="unsupported_image")
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


def _wanted(prompt: ChatPrompt) -> list[int]:
    """The indexes of the images that are in the prompt."""
    return [int(mark[1]) for message in prompt.messages for mark in IMAGE_MARK.finditer(message["content"])]


def _replaced(prompt: ChatPrompt, places: dict[float, Place], texts: dict[int, str]) -> tuple[ChatPrompt, dict[float, Place]]:
    """The prompt with a text in place of each mark, and the places behind the same characters as before."""

    def filled(content: str) -> str:
        return IMAGE_MARK.sub(lambda mark: texts[int(mark[1])], content)

    moved = {
        seconds: place._replace(characters=len(filled(prompt.messages[place.message]["content"][: place.characters])))
        if place.message < len(prompt.messages)
        else place
        for seconds, place in places.items()
    }
    messages = [ChatMessage({**message, "content": filled(message["content"])}) for message in prompt.messages]
    return structs.replace(prompt, messages=messages), moved


def shown_ids(token_ids: Sequence[int], tokenizer: Tokenizer, rules: ImageRules | None) -> Sequence[int]:
    """The ids of a prompt as clients see them: each position of an image as the model's own token for one."""
    if rules is None or not token_ids or max(token_ids) < FIRST_IMAGE_ID:
        return token_ids
    written = tokenizer.encode_part(rules.placeholder)
    # Some write one token for an image, others one between a begin and an end. The simulator writes none.
    placeholder = written[len(written) // 2] if written else tokenizer.end_id
    return [placeholder if token_id >= FIRST_IMAGE_ID else token_id for token_id in token_ids]
