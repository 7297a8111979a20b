"""Tiny random models for text and images, as transformers makes them, with tokenizer, chat template and processor files.

Their weights are of a size that the tokens depend on the picture. Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import functools
import json
import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from chat_model import END_ID, SPECIAL_IDS, VOCABULARY, make_tokenizer
from penstock.wire.images import IMAGE_NAME_BYTES, ImageSpan, image_ids

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

Kind = Literal["idefics3", "qwen2_5_vl", "qwen3_vl"]
KINDS: tuple[Kind, ...] = ("idefics3", "qwen3_vl")
VARIANTS = ("", "other")
"""The second has other sizes of everything, tied embeddings, a head of its own for each query, and, by family: tiles with more patches than
the tower has positions; three levels of features."""
CONTEXT = 4096

# What the chat template writes for one image.
_QWEN_PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
PLACEHOLDERS: dict[Kind, str] = {"idefics3": "<image>", "qwen2_5_vl": _QWEN_PLACEHOLDER, "qwen3_vl": _QWEN_PLACEHOLDER}

_IDEFICS_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_QWEN_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_SPECIAL: dict[Kind, tuple[str, ...]] = {
    "idefics3": (*_IDEFICS_TOKENS, *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))),
    "qwen2_5_vl": _QWEN_TOKENS,
    "qwen3_vl": _QWEN_TOKENS,
}
IMAGE_TOKEN_ID = SPECIAL_IDS.stop
QWEN_TOKEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN_ID,
    "vision_start_token_id": IMAGE_TOKEN_ID + 1,
    "vision_end_token_id": IMAGE_TOKEN_ID + 2,
    "video_token_id": IMAGE_TOKEN_ID + 3,
}
"""What transformers has at each position of an image."""

_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}
{%- for part in message.content or [] %}
{%- if part.type == 'image' %}{{ 'PLACEHOLDER' }}{% elif part.type == 'text' %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@dataclass(frozen=True)
class Sizes:
    """Of one variant. `tile` is a side in pixels; `table` is how many positions the tower knows; `levels` are layers of the tower."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    tower: int
    tower_heads: int
    tower_layers: int
    patch: int
    tile: int = 0
    table: int = 0
    scale: int = 2
    levels: tuple[int, ...] = ()
    sections: tuple[int, int, int] = (6, 5, 5)


_SIZES: dict[tuple[Kind, str], Sizes] = {
    ("idefics3", ""): Sizes(128, 4, 2, 32, False, 64, 4, 2, patch=8, tile=64, table=64),
    ("idefics3", "other"): Sizes(96, 3, 3, 32, True, 48, 2, 3, patch=6, tile=72, table=81, scale=3),
    # For benches: a second of one core for an image.
    ("idefics3", "heavy"): Sizes(256, 4, 2, 64, False, 512, 8, 8, patch=16, tile=256, table=256, scale=4),
    ("qwen2_5_vl", ""): Sizes(128, 4, 2, 32, False, 64, 4, 3, patch=14, levels=(1,)),
    ("qwen3_vl", ""): Sizes(128, 4, 2, 32, False, 64, 4, 3, patch=16, table=64, levels=(0, 1)),
    ("qwen3_vl", "other"): Sizes(96, 3, 3, 40, True, 48, 3, 4, patch=8, table=36, levels=(0, 2, 3), sections=(8, 6, 6)),
}


def make_vision_model(kind: Kind, directory: Path, variant: str = "", dtype: torch.dtype | None = None) -> Path:
    """Writes the model in Hugging Face's layout; the same wherever it is made. float32 unless `dtype` says otherwise."""
    import torch

    make_tokenizer(directory, _TEMPLATE.replace("PLACEHOLDER", PLACEHOLDERS[kind]), _SPECIAL[kind])
    sizes = _SIZES[kind, variant]
    # No draw of transformers' own is kept.
    model = {"idefics3": _make_idefics3, "qwen2_5_vl": _make_qwen2_5_vl, "qwen3_vl": _make_qwen3_vl}[kind](sizes)
    _draw(model, sizes)
    model.to(dtype or torch.float32).save_pretrained(directory)
    _write_processor(kind, directory, sizes)
    return directory


@functools.cache
def vision_model(kind: Kind, variant: str = "") -> Path:
    """The model's directory, made once a process and gone with it."""
    folder = tempfile.TemporaryDirectory(prefix="vision-model-")
    _FOLDERS.append(folder)
    return make_vision_model(kind, Path(folder.name) / kind, variant)


# Kept alive until the process ends: a folder goes when its object does.
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def make_picture(seed: int, width: int, height: int) -> Image:
    """Coloured rectangles. Different seeds make pictures that a tower sees as different."""
    from PIL import Image, ImageDraw

    numbers = random.Random(seed)
    image = Image.new("RGB", (width, height), _colour(numbers))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        left, top = numbers.randrange(width), numbers.randrange(height)
        draw.rectangle((left, top, left + numbers.randrange(1, width + 1), top + numbers.randrange(1, height + 1)), _colour(numbers))
    return image


@dataclass(frozen=True)
class PreparedImage:
    """What a worker gets of an image, made by transformers' processor."""

    name: bytes
    pixels: bytes
    grid: tuple[int, int]
    size: tuple[int, int]


@dataclass(frozen=True)
class VisionPrompt:
    """A prompt as transformers wants it (`inputs`), and as Penstock does."""

    inputs: dict[str, Any]
    token_ids: tuple[int, ...]
    spans: tuple[ImageSpan, ...]
    images: tuple[PreparedImage, ...]


def make_prompt(directory: Path, text: str, pictures: Sequence[Image] = (), *, as_engines: bool = False) -> VisionPrompt:
    """`text` has the family's placeholder for each picture, as the chat template writes it. `as_engines`: transformers sees the pixels that
    vLLM and SGLang see."""
    import torch

    kind = _kind(directory)
    expanded = _with_positions(directory, kind, text, pictures)
    ids: list[int] = tokenizer(directory)(expanded, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([ids])
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if pictures:
        made = (engines_processor if as_engines else processor)(directory)([list(pictures)], return_tensors="pt")
        inputs |= {key: made[key] for key in ("pixel_values", "pixel_attention_mask", "image_grid_thw") if key in made}
        if kind != "idefics3":
            inputs["mm_token_type_ids"] = (tokens == IMAGE_TOKEN_ID).long()
    images = tuple(prepare(directory, picture) for picture in pictures)
    return VisionPrompt(inputs, *_house_ids(directory, kind, ids, images), images)


def prepare(directory: Path, picture: Image) -> PreparedImage:
    """The pixels that the family's processor makes of a picture, before they are normalised."""
    import torch

    is_tiled = _kind(directory) == "idefics3"
    more = {"return_row_col_info": True} if is_tiled else {}
    made = processor(directory)([[picture]], return_tensors="pt", do_rescale=False, do_normalize=False, **more)
    values: torch.Tensor = made["pixel_values"]
    if is_tiled:
        grid = (int(made["rows"][0][0]), int(made["cols"][0][0]))
        pixels = values[0].permute(0, 2, 3, 1)
    else:
        settings = processor(directory)
        merge, patch = settings.merge_size, settings.patch_size
        _, rows, columns = made["image_grid_thw"][0].tolist()
        grid = (rows // merge, columns // merge)
        cut = values.view(*grid, merge, merge, 3, settings.temporal_patch_size, patch, patch)[:, :, :, :, :, 0]
        pixels = cut.permute(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, 3)
    data = pixels.round().to(torch.uint8).numpy().tobytes()
    name = blake2b(data + repr((picture.size, grid)).encode(), digest_size=IMAGE_NAME_BYTES).digest()
    return PreparedImage(name, data, grid, picture.size)


def positions_per_tile(directory: Path) -> int:
    config = json.loads((directory / "config.json").read_text())
    tile = processor(directory).max_image_size["longest_edge"]
    return int((tile // config["vision_config"]["patch_size"] // config["scale_factor"]) ** 2)


@functools.cache
def reference(directory: Path) -> Any:
    """The model in transformers."""
    import torch
    from transformers import AutoModelForImageTextToText

    # Threads that wait for each other at every operation gain nothing on a model so small.
    torch.set_num_threads(1)
    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def generate(directory: Path, prompt: VisionPrompt, count: int) -> list[int]:
    """What transformers generates, greedily, also behind an end of the message."""
    import torch

    with torch.inference_mode():
        made = reference(directory).generate(**prompt.inputs, max_new_tokens=count, do_sample=False, eos_token_id=None)
    tokens: list[int] = made[0, prompt.inputs["input_ids"].shape[1] :].tolist()
    return tokens


def reference_logits(directory: Path, prompt: VisionPrompt) -> torch.Tensor:
    """Of each token of the prompt, in transformers: [tokens, vocabulary]."""
    import torch

    with torch.inference_mode():
        scores: torch.Tensor = reference(directory)(**prompt.inputs).logits[0]
    return scores


def reference_features(directory: Path, prompt: VisionPrompt) -> list[torch.Tensor]:
    """Of each image, as a Tower makes them: [positions, width × levels]."""
    import torch

    keys = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    with torch.inference_mode():
        made = reference(directory).get_image_features(**{key: prompt.inputs[key] for key in keys if key in prompt.inputs})
    if _kind(directory) == "qwen2_5_vl":
        return list(made.pooler_output)
    if _kind(directory) == "qwen3_vl":
        return [torch.cat(levels, -1) for levels in zip(made.pooler_output, *made.deepstack_features, strict=True)]
    tiles = torch.cat(made.pooler_output) if isinstance(made.pooler_output, (list, tuple)) else made.pooler_output
    each = positions_per_tile(directory)
    counts = [each * (image.grid[0] * image.grid[1] + 1) for image in prompt.images]
    return list(tiles.reshape(-1, tiles.shape[-1]).split(counts))


@functools.cache
def tokenizer(directory: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory)


@functools.cache
def processor(directory: Path) -> Any:
    """The part that makes pixels. Those that need torchvision are not used."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made: Any = (Idefics3ImageProcessorPil if _kind(directory) == "idefics3" else Qwen2VLImageProcessorPil).from_pretrained(directory)
    return made


@functools.cache
def engines_processor(directory: Path) -> Any:
    """The one that transformers chooses where torchvision is installed. It resizes otherwise: up to 2 of 255 in a colour."""
    from transformers import AutoImageProcessor

    made: Any = AutoImageProcessor.from_pretrained(directory)  # type: ignore[no-untyped-call]
    return made


def _kind(directory: Path) -> Kind:
    named = json.loads((directory / "config.json").read_text())["model_type"]
    return named if named in PLACEHOLDERS else "idefics3"


def _colour(numbers: random.Random) -> tuple[int, int, int]:
    return numbers.randrange(256), numbers.randrange(256), numbers.randrange(256)


def _with_positions(directory: Path, kind: Kind, text: str, pictures: Sequence[Image]) -> str:
    """The text with all that stands for each picture, as transformers' processors write it."""
    pieces = text.split(PLACEHOLDERS[kind])
    assert len(pieces) == len(pictures) + 1, "as many placeholders as pictures"
    made = [_layout(directory, kind, prepare(directory, picture).grid) for picture in pictures]
    return "".join(piece + layout for piece, layout in zip(pieces, [*made, ""], strict=True))


def _layout(directory: Path, kind: Kind, grid: tuple[int, int]) -> str:
    rows, columns = grid
    if kind != "idefics3":
        return f"<|vision_start|>{'<|image_pad|>' * (rows * columns)}<|vision_end|>"
    fake, positions = "<fake_token_around_image>", "<image>" * positions_per_tile(directory)
    tiles = ["".join(f"{fake}<row_{row}_col_{column}>{positions}" for column in range(1, columns + 1)) + "\n" for row in range(1, rows + 1)]
    return "".join(tiles) + ("\n" if tiles else "") + f"{fake}<global-img>{positions}{fake}"


def _house_ids(
    directory: Path, kind: Kind, ids: list[int], images: Sequence[PreparedImage]
) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """Each position gets the id of its image. An image's span has all that stands for it."""
    before = 2 if kind == "idefics3" else 1
    found = iter([index for index, token in enumerate(ids) if token == IMAGE_TOKEN_ID])
    made, spans = list(ids), []
    for image in images:
        tiles = (image.grid[0] * image.grid[1] + 1) * positions_per_tile(directory) if kind == "idefics3" else 0
        places = [next(found) for _ in range(tiles or image.grid[0] * image.grid[1])]
        for place, token in zip(places, image_ids(image.name, len(places)), strict=True):
            made[place] = token
        spans.append(ImageSpan(image.name, places[0] - before, places[-1] + 2, image.grid, image.size))
    assert next(found, None) is None
    return tuple(made), tuple(spans)


def _text_sizes(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": sizes.hidden,
        "intermediate_size": 2 * sizes.hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": sizes.tied,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": 0,
    }


def _make_idefics3(sizes: Sizes) -> Any:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    side = int(sizes.table**0.5) * sizes.patch
    tower = Idefics3VisionConfig(
        hidden_size=sizes.tower,
        intermediate_size=2 * sizes.tower,
        num_hidden_layers=sizes.tower_layers,
        num_attention_heads=sizes.tower_heads,
        image_size=side,
        patch_size=sizes.patch,
    )
    config = Idefics3Config(
        vision_config=tower,
        text_config=LlamaConfig(**_text_sizes(sizes)),
        image_token_id=IMAGE_TOKEN_ID,
        scale_factor=sizes.scale,
        tie_word_embeddings=sizes.tied,
    )
    return Idefics3ForConditionalGeneration(config)  # type: ignore[no-untyped-call]


def _make_qwen3_vl(sizes: Sizes) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {**_text_sizes(sizes), "rope_parameters": {**_qwen_rope(sizes), "mrope_interleaved": True}}
    tower = {**_qwen_tower(sizes), "num_position_embeddings": sizes.table, "deepstack_visual_indexes": list(sizes.levels)}
    config = Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=sizes.tied, **QWEN_TOKEN_IDS)
    return Qwen3VLForConditionalGeneration(config)  # type: ignore[no-untyped-call]


def _make_qwen2_5_vl(sizes: Sizes) -> Any:
    """Windows of 2 × 2 positions, so that images have whole ones and all kinds of parts. `levels` are the layers without windows."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {key: value for key, value in _text_sizes(sizes).items() if key != "head_dim"}
    text["rope_parameters"] = _qwen_rope(sizes)
    tower = {**_qwen_tower(sizes), "window_size": 2 * sizes.scale * sizes.patch, "fullatt_block_indexes": list(sizes.levels)}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=sizes.tied, **QWEN_TOKEN_IDS)
    return Qwen2_5_VLForConditionalGeneration(config)  # type: ignore[no-untyped-call]


def _qwen_tower(sizes: Sizes) -> dict[str, Any]:
    return {
        "depth": sizes.tower_layers,
        "hidden_size": sizes.tower,
        "intermediate_size": 2 * sizes.tower,
        "num_heads": sizes.tower_heads,
        "patch_size": sizes.patch,
        "spatial_merge_size": sizes.scale,
        "temporal_patch_size": 2,
        "out_hidden_size": sizes.hidden,
    }


def _qwen_rope(sizes: Sizes) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes.sections)}


def _draw(model: Any, sizes: Sizes) -> None:
    """Weights that keep the size of what goes through them, and features as large as the embedding of a token."""
    import torch

    source = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 1:
                middle = 1.0 if re.search(r"norm\d?\.weight$", name) else 0.0
                weights.copy_(middle + 0.1 * torch.randn(weights.shape, generator=source))
            else:
                scale = _scale(name, weights[0].numel() ** -0.5, sizes)
                weights.copy_(scale * torch.randn(weights.shape, generator=source))


def _scale(name: str, keeps: float, sizes: Sizes) -> float:
    if "embed_tokens" in name:
        return 0.35 if sizes.tied else 1.0
    if "lm_head" in name:
        return 0.35
    if "merger" in name or "connector" in name:
        return (0.7 if sizes.tied else 2.0) * keeps
    return 0.5 if "position_embedding" in name or "pos_embed" in name else 1.5 * keeps


def _write_processor(kind: Kind, directory: Path, sizes: Sizes) -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made: Any
    if kind == "idefics3":
        made = Idefics3ImageProcessorPil(size={"longest_edge": 2 * sizes.tile}, max_image_size={"longest_edge": sizes.tile})
        positions = (sizes.tile // sizes.patch // sizes.scale) ** 2
        settings: dict[str, Any] = {"processor_class": "Idefics3Processor", "image_seq_len": positions}
    else:
        unit = (sizes.patch * sizes.scale) ** 2
        mean = (0.5, 0.5, 0.5) if sizes.patch == 16 else (0.48, 0.46, 0.41)
        made = Qwen2VLImageProcessorPil(
            patch_size=sizes.patch,
            merge_size=sizes.scale,
            size={"shortest_edge": 2 * unit, "longest_edge": 64 * unit},
            image_mean=mean,
            image_std=(0.5, 0.4, 0.3) if sizes.tied else (0.5, 0.5, 0.5),
        )
        settings = {"processor_class": "Qwen2_5_VLProcessor" if kind == "qwen2_5_vl" else "Qwen3VLProcessor"}
    made.save_pretrained(directory)
    _rewrite(directory / "preprocessor_config.json", {"processor_class": settings["processor_class"]})
    (directory / "processor_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _rewrite(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2), encoding="utf-8")
