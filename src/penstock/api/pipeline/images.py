"""The images of a chat: read and named, or, for a model that reads only text, refused or replaced by a note."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct, structs

from penstock.api.auth.keys import Tenant
from penstock.api.models import Models, ServedModel
from penstock.media.file import sent_file
from penstock.media.formats import read_header
from penstock.media.picture import ImageRef, Picture
from penstock.router.policy import PlacedMark
from penstock.text.images import IMAGE_MARK, named_mark
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, Tokenizer
from penstock.wire.errors import RequestError
from penstock.wire.images import FIRST_IMAGE_ID, ImageRules

if TYPE_CHECKING:
    from penstock.api.pipeline.request import PromptContext

_Texts = dict[int, str] | list[str]
"""What stands for each image, by its index."""


class PictureReader(Protocol):
    """Reads images: see `media.reader`."""

    async def read(self, refs: Sequence[ImageRef], lane: str, root: bytes, rules: ImageRules, weight: float) -> list[Picture]:
        """The pictures, in order. Raises RequestError that names the field of the image that cannot be read."""

    async def fetch(self, refs: Sequence[ImageRef], lane: str, weight: float) -> dict[str, str]:
        """The files of those that must be fetched, in base64, by their URLs. Raises RequestError as `read` does."""


class Shown(NamedTuple):
    """A prompt whose images are read, or replaced by notes. `marks` are those for the cache."""

    prompt: ChatPrompt
    marks: Sequence[PlacedMark]
    pictures: tuple[Picture, ...] = ()


class _Filled(NamedTuple):
    """A message's content with a text in place of each image's mark: where these marks ended, and how much longer it is from there on."""

    content: str
    ends: list[int]
    longer: list[int]


class Images(Struct, frozen=True):
    """The images of one request. `pictures` are those that were read, by their index: none is read twice, even if several prompts are
    tried."""

    refs: Sequence[ImageRef]
    pictures: dict[int, Picture]

    async def show(
        self, prompt: ChatPrompt, marks: Sequence[PlacedMark], model: ServedModel, tenant: Tenant, root: bytes, context: PromptContext
    ) -> Shown:
        """The prompt with its images. Raises RequestError that names the part that cannot be read, or not by this model."""
        rules = model.info.images
        if rules is None:
            return Shown(*_replaced(prompt, marks, await _notes(model, context.models, self.refs, context.drops_images)))
        wanted = [int(mark[1]) for message in prompt.messages for mark in IMAGE_MARK.finditer(message["content"])]
        if missing := [index for index in wanted if index not in self.pictures]:
            assert context.media is not None, "a front end has a reader of images"
            read = await context.media.read([self.refs[index] for index in missing], tenant.lane, root, rules, tenant.weight)
            self.pictures.update(zip(missing, read, strict=True))
        pictures = {index: self.pictures[index] for index in wanted}
        prompt, marks = _replaced(prompt, marks, {index: named_mark(picture.name) for index, picture in pictures.items()})
        layouts = {picture.name: picture.layout for picture in pictures.values()}
        return Shown(structs.replace(prompt, images=layouts), marks, tuple(pictures.values()))


async def _notes(model: ServedModel, models: Models, refs: Sequence[ImageRef], drops: bool) -> list[str]:
    """What a model that reads only text gets in place of each image. Raises RequestError for one that it should see, unless it `drops`."""
    if not drops and (shown := next((ref for ref in refs if not ref.is_old), None)) is not None:
        readers = ", ".join(f"`{each.info.name}`" for each in models.all() if each.info.images is not None)
        other = f"; these models read images: {readers}" if readers else "; no model at this server reads images"
        message = f"`{shown.field}` is an image: images are not supported by this model, `{model.info.name}`{other}"
        raise RequestError(message, param=shown.field, code="unsupported_image")
    return [await note(ref) for ref in refs]


async def note(ref: ImageRef) -> str:
    """What stands for an image that is neither fetched nor decoded. It depends only on what was sent: prompts keep their prefixes."""
    # Looking at a header takes up to a millisecond, and a history may have thousands.
    await asyncio.sleep(0)
    try:
        file = sent_file(ref)
        header = read_header(await asyncio.to_thread(file.joined) if file.has_lines else file)
    except (RequestError, ValueError):
        return "[image left out: this model reads only text]"
    return f"[image: {header.width} × {header.height} {header.kind}, left out: this model reads only text]"


def _replaced(prompt: ChatPrompt, marks: Sequence[PlacedMark], texts: _Texts) -> tuple[ChatPrompt, list[PlacedMark]]:
    """The prompt with a text in place of each mark, and the marks for the cache behind the same characters as before."""

    filled = [_filled(message["content"], texts) for message in prompt.messages]

    def moved(mark: PlacedMark) -> PlacedMark:
        if mark.message is None or mark.message >= len(filled):
            return mark
        _, ends, longer = filled[mark.message]
        return structs.replace(mark, characters=mark.characters + longer[bisect_right(ends, mark.characters) - 1])

    messages = [ChatMessage({**message, "content": found.content}) for message, found in zip(prompt.messages, filled, strict=True)]
    return structs.replace(prompt, messages=messages), [moved(mark) for mark in marks]


def _filled(content: str, texts: _Texts) -> _Filled:
    ends, longer = [0], [0]

    def fill(mark: re.Match[str]) -> str:
        text = texts[int(mark[1])]
        ends.append(mark.end())
        longer.append(longer[-1] + len(text) - len(mark[0]))
        return text

    return _Filled(IMAGE_MARK.sub(fill, content), ends, longer)


def shown_ids(token_ids: Sequence[int], tokenizer: Tokenizer, rules: ImageRules | None) -> Sequence[int]:
    """The ids of a prompt as clients see them: each position of an image as the model's own token for one."""
    if rules is None or not token_ids or max(token_ids) < FIRST_IMAGE_ID:
        return token_ids
    written = tokenizer.encode_part(rules.placeholder)
    # Some write one token for an image, others one between a begin and an end. The simulator writes none.
    placeholder = written[len(written) // 2] if written else tokenizer.end_id
    return [placeholder if token_id >= FIRST_IMAGE_ID else token_id for token_id in token_ids]
