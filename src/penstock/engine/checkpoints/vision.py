"""The vision tower in a model directory of Hugging Face's layout: `vision_config`, and the settings of the model's processor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from penstock.engine.shape import ModelShape
from penstock.engine.vision.shape import Approximation, Encoder, Idefics3Shape, PixelScale, Qwen25VLShape, QwenVLShape, TowerShape
from penstock.text.tokenizers.model_settings import ModelSettings, read_settings
from penstock.wire.errors import ConfigError

IDEFICS3, SMOLVLM = "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"
QWEN25_VL, QWEN3_VL = "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"
# The defaults of the architecture: files leave them out.
SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "patch_size": 32,
    "image_size": 224,
}
QWEN3_VIT = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "num_heads": 16,
    "patch_size": 16,
    "deepstack_visual_indexes": [8, 16, 24],
}
QWEN25_VIT = {"hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "patch_size": 14}
GELUS: dict[str, Approximation] = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}
CHANNELS = 3


def read_tower(directory: Path, config: ModelSettings, architecture: str, text: ModelShape) -> TowerShape:
    """Raises ConfigError for what is missing or not supported."""
    vision, processor = subsettings(config, "vision_config"), read_processor(directory)
    if architecture == QWEN3_VL:
        return _qwen3_vl(vision, processor, text)
    if architecture == QWEN25_VL:
        return _qwen25_vl(vision, processor, text)
    return _idefics3(config, vision, processor, text)


def subsettings(config: ModelSettings, key: str) -> ModelSettings:
    values = config.values.get(key)
    if not isinstance(values, Mapping):
        raise config.wrong(key, "an object")
    return ModelSettings(f"{config.source}: {key}", values)


def read_processor(directory: Path) -> ModelSettings:
    """The settings of what prepares pictures. Newer directories have them inside of the processor's: these come first, as in
    transformers and in `media.families.make`."""
    outer, own = directory / "processor_config.json", directory / "preprocessor_config.json"
    if outer.exists() and (found := read_settings(outer)).has("image_processor"):
        return subsettings(found, "image_processor")
    if own.exists():
        return read_settings(own)
    raise ConfigError(f"--model {directory}: {own.name} is missing: expected the settings of the model's image processor")


def _idefics3(config: ModelSettings, vision: ModelSettings, processor: ModelSettings, text: ModelShape) -> Idefics3Shape:
    vision = ModelSettings(vision.source, {**SIGLIP, **vision.values})
    encoder = _encoder(vision, "num_hidden_layers", "num_attention_heads", vision.positive("layer_norm_eps", 1e-6))
    tile = subsettings(processor, "max_image_size").size("longest_edge")
    merge = config.size("scale_factor", 2)
    if tile % (encoder.patch * merge):
        raise processor.wrong("max_image_size", f"a multiple of {merge} patches of {encoder.patch} pixels")
    table_side = vision.size("image_size") // encoder.patch
    return Idefics3Shape(encoder, _pixels(processor), text.hidden_size, merge, tile, table_side)


def _qwen3_vl(vision: ModelSettings, processor: ModelSettings, text: ModelShape) -> QwenVLShape:
    vision = ModelSettings(vision.source, {**QWEN3_VIT, **vision.values})
    encoder = _encoder(vision, "depth", "num_heads", 1e-6)
    merge, frames, theta = _qwen_settings(vision, processor, encoder, text)
    table = vision.size("num_position_embeddings", 2304)
    if math.isqrt(table) ** 2 != table:
        raise vision.wrong("num_position_embeddings", "a square number")
    levels = _level_layers(vision, encoder, text)
    return QwenVLShape(encoder, _pixels(processor), text.hidden_size, merge, math.isqrt(table), frames, levels, theta)


def _qwen25_vl(vision: ModelSettings, processor: ModelSettings, text: ModelShape) -> Qwen25VLShape:
    vision = ModelSettings(vision.source, {**QWEN25_VIT, **vision.values})
    encoder = _encoder(vision, "depth", "num_heads", 1e-6, {"silu": "none"})
    merge, _, theta = _qwen_settings(vision, processor, encoder, text)
    window = vision.size("window_size", 112) // (merge * encoder.patch)
    if not window:
        raise vision.wrong("window_size", f"at least {merge * encoder.patch}, the pixels of a position")
    full = frozenset(vision.integers("fullatt_block_indexes")) if vision.has("fullatt_block_indexes") else frozenset({7, 15, 23, 31})
    return Qwen25VLShape(encoder, _pixels(processor), text.hidden_size, merge, window, full, theta)


def _qwen_settings(vision: ModelSettings, processor: ModelSettings, encoder: Encoder, text: ModelShape) -> tuple[int, int, float]:
    """How many patches of a side are merged, the frames of a patch, and the base of positions."""
    frames, merge = vision.size("temporal_patch_size", 2), vision.size("spatial_merge_size", 2)
    for key, expected in (("patch_size", encoder.patch), ("merge_size", merge), ("temporal_patch_size", frames)):
        if processor.has(key) and processor.size(key) != expected:
            raise processor.wrong(key, f"{expected}, as in the tower's settings")
    if encoder.head_dim % 4:
        raise vision.wrong("num_heads", "heads whose size is a multiple of 4: rows and columns turn a half of each")
    if vision.size("out_hidden_size", text.hidden_size) != text.hidden_size:
        raise vision.wrong("out_hidden_size", f"{text.hidden_size}, the hidden size of the text model")
    rope = subsettings(vision, "rope_parameters") if vision.has("rope_parameters") else vision
    return merge, frames, rope.positive("rope_theta", 10_000.0)


def _encoder(vision: ModelSettings, layers: str, heads: str, eps: float, activations: Mapping[str, Approximation] = GELUS) -> Encoder:
    hidden_size, head_count = vision.size("hidden_size"), vision.size(heads)
    if hidden_size % head_count:
        raise vision.wrong(heads, f"a divisor of hidden_size, {hidden_size}")
    activation = vision.text("hidden_act", list(activations)[-1])
    if activation not in activations:
        raise vision.wrong("hidden_act", f"one of {', '.join(activations)}")
    for key in ("num_channels", "in_channels", "in_chans"):
        if vision.integer(key, CHANNELS) != CHANNELS:
            raise vision.wrong(key, str(CHANNELS))
    sizes = hidden_size, vision.size(layers), head_count, vision.size("intermediate_size"), vision.size("patch_size")
    return Encoder(*sizes, eps, activations[activation])


def _level_layers(vision: ModelSettings, encoder: Encoder, text: ModelShape) -> tuple[int, ...]:
    key = "deepstack_visual_indexes"
    found = tuple(vision.integers(key)) if vision.has(key) else ()
    if sorted(set(found)) != list(found) or not all(0 <= layer < encoder.layers for layer in found) or len(found) > text.layers:
        raise vision.wrong(
            key, f"some of the tower's {encoder.layers} layers, in order, and at most {text.layers}, one for each layer of text"
        )
    return found


def _pixels(processor: ModelSettings) -> PixelScale:
    factor = processor.positive("rescale_factor", 1 / 255) if processor.flag("do_rescale", True) else 1.0
    if not processor.flag("do_normalize", True):
        return PixelScale(factor, (0.0,) * CHANNELS, (1.0,) * CHANNELS)
    mean, deviation = processor.numbers("image_mean"), processor.numbers("image_std")
    if len(mean) != CHANNELS or len(deviation) != CHANNELS or not all(deviation):
        raise processor.wrong("image_std" if len(mean) == CHANNELS else "image_mean", "a number for each of red, green and blue")
    return PixelScale(factor, tuple(mean), tuple(deviation))
