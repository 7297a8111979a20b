"""A model directory in Hugging Face's layout: config.json and safetensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.engine.checkpoints.vision import IDEFICS3, QWEN3_VL, QWEN25_VL, SMOLVLM, read_tower, subsettings
from penstock.engine.shape import ModelShape, RopeScaling, joined_axes, mixed_axes
from penstock.engine.vision.shape import TowerShape
from penstock.text.tokenizers.model_settings import CONFIG, ModelSettings, read_end_ids, read_settings
from penstock.wire.errors import ConfigError

LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
TEXT_MODELS = {IDEFICS3: LLAMA, SMOLVLM: LLAMA, QWEN25_VL: QWEN2, QWEN3_VL: QWEN3}
"""What the text model of each architecture for images is."""
ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3, *TEXT_MODELS)
TEXT_PREFIXES = ("model.language_model.", "model.text_model.", "language_model.model.")
HEAD_PREFIX = "language_model.lm_head."
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Defaults in the architectures' own code, for configurations without these keys.
DEFAULT_SLIDING_WINDOW = 4096
DEFAULT_FULL_LAYERS = 28
QWEN3_HEAD_DIM = 128
# The text model inside of another: its files leave out what is as in Llama's own code.
LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
Axes = tuple[list[int], Callable[[Sequence[int]], tuple[int, ...]]]
AXES: Mapping[str, Axes] = {QWEN25_VL: ([16, 24, 24], joined_axes), QWEN3_VL: ([24, 20, 20], mixed_axes)}
"""M-RoPE: how many pairs of a head turn by time, by row and by column, where files do not say it, and which ones these are."""


@dataclass(frozen=True)
class HuggingFaceCheckpoint:
    """A `Checkpoint`."""

    shape: ModelShape
    end_ids: frozenset[int]
    files: tuple[Path, ...]
    tower: TowerShape | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, read in self._weights():
            if not self._is_of_tower(name) and self._is_wanted(found := _text_name(name)):
                yield found, read()

    def tower_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, read in self._weights():
            if self._is_of_tower(name):
                yield name.removeprefix("model."), read()

    def _weights(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        return ((name, read) for file in self.files for name, read in _file_tensors(file))

    def _is_of_tower(self, name: str) -> bool:
        return self.tower is not None and name.removeprefix("model.").startswith(self.tower.prefixes)

    def _is_wanted(self, name: str) -> bool:
        # Old checkpoints also store rotary frequencies, and some store the embedding twice.
        return not name.endswith("rotary_emb.inv_freq") and not (self.shape.tied_embeddings and name == "lm_head.weight")


def open_hugging_face(directory: Path) -> HuggingFaceCheckpoint:
    config = read_settings(directory / CONFIG)
    end_ids = read_end_ids(directory)
    architecture = _architecture(config)
    shape = _shape(_text_settings(config, architecture), TEXT_MODELS.get(architecture, architecture), AXES.get(architecture))
    tower = read_tower(directory, config, architecture, shape) if architecture in TEXT_MODELS else None
    files = _files(directory)
    for file in files:
        _check_readable(file)
    return HuggingFaceCheckpoint(shape, end_ids, files, tower)


def _text_name(name: str) -> str:
    """Models for text and images have their text model under another name."""
    found = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
    if found:
        return "model." + name.removeprefix(found)
    return "lm_head." + name.removeprefix(HEAD_PREFIX) if name.startswith(HEAD_PREFIX) else name


def _text_settings(config: ModelSettings, architecture: str) -> ModelSettings:
    """The text model's settings. Whether embeddings are tied is said outside of them, if it is said there."""
    if architecture not in TEXT_MODELS:
        return config
    if architecture == QWEN25_VL and not config.has("text_config"):
        # Older files have all settings together.
        return config
    text = subsettings(config, "text_config")
    expected = {LLAMA: "llama", QWEN2: "qwen2_5_vl_text", QWEN3: "qwen3_vl_text"}[TEXT_MODELS[architecture]]
    if text.text("model_type", expected) != expected:
        raise text.wrong("model_type", repr(expected))
    defaults = LLAMA_DEFAULTS if expected == "llama" else {}
    tied = {key: config.values[key] for key in ("tie_word_embeddings",) if config.has(key)}
    return ModelSettings(text.source, {**defaults, **text.values, **tied})


def _shape(config: ModelSettings, architecture: str, axes: Axes | None) -> ModelShape:
    if config.text("hidden_act", "silu") != "silu":
        raise config.wrong("hidden_act", "'silu'")
    heads, layers, hidden_size = config.size("num_attention_heads"), config.size("num_hidden_layers"), config.size("hidden_size")
    rope_theta, rope, rope_parameters = _rope(config)
    head_dim = config.size("head_dim", QWEN3_HEAD_DIM if architecture == QWEN3 else hidden_size // heads)
    sliding_layers = _sliding_layers(config, architecture, layers)
    attention_bias = architecture in (LLAMA, QWEN3) and config.flag("attention_bias", False)
    return ModelShape(
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=head_dim,
        intermediate_size=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        trained_length=config.size("max_position_embeddings"),
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope=rope,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == QWEN2,
        output_bias=attention_bias,
        mlp_bias=architecture == LLAMA and config.flag("mlp_bias", False),
        qk_norm=architecture == QWEN3,
        sliding_window=config.size("sliding_window", DEFAULT_SLIDING_WINDOW) if sliding_layers else None,
        sliding_layers=sliding_layers,
        rope_axes=() if axes is None else _axes(rope_parameters, head_dim, axes),
    )


def _architecture(config: ModelSettings) -> str:
    named = config.strings("architectures")
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        raise config.wrong("architectures", f"one of {', '.join(ARCHITECTURES)}")
    if config.has("quantization_config"):
        raise config.wrong("quantization_config", "none: weights as float32, float16 or bfloat16, or a GGUF file")
    return named[0]


def _kv_heads(config: ModelSettings, heads: int) -> int:
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    return kv_heads


def _sliding_layers(config: ModelSettings, architecture: str, layers: int) -> frozenset[int]:
    """Mistral uses a sliding window in every layer unless its window is null; Qwen only in the layers that its config names."""
    is_off = "sliding_window" in config.values and not config.has("sliding_window")
    if architecture == LLAMA or is_off:
        return frozenset()
    if architecture == MISTRAL:
        return frozenset(range(layers))
    if not config.flag("use_sliding_window", False):
        return frozenset()
    if not config.has("layer_types"):
        return frozenset(range(config.integer("max_window_layers", DEFAULT_FULL_LAYERS), layers))
    kinds = config.strings("layer_types")
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.wrong("layer_types", f"'full_attention' or 'sliding_attention' for each of {layers} layers")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def _rope(config: ModelSettings) -> tuple[float, RopeScaling, ModelSettings]:
    """Its base, its stretching, and all of its parameters."""
    key = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
    values = config.values.get(key) or {}
    if not isinstance(values, Mapping) or any(isinstance(value, Mapping) for value in values.values()):
        raise config.wrong(key, "one set of parameters for all layers")
    scaling = ModelSettings(f"{config.source}: {key}", values)
    for settings in (scaling, config):
        if settings.number("partial_rotary_factor", 1.0) != 1.0:
            raise settings.wrong("partial_rotary_factor", "1.0: partial rotary heads are not supported")
    return scaling.positive("rope_theta", config.positive("rope_theta", 10_000.0)), _scaling(config, scaling), scaling


def _axes(rope: ModelSettings, head_dim: int, axes: Axes) -> tuple[int, ...]:
    """As in transformers, the architecture alone says whether the axes take turns."""
    usual, arranged = axes
    sections = rope.integers("mrope_section") if rope.has("mrope_section") else usual
    if len(sections) != len(usual) or sum(sections) != head_dim // 2 or min(sections) < 0:
        raise rope.wrong("mrope_section", f"three numbers whose sum is {head_dim // 2}, half the size of a head")
    return arranged(sections)


def _scaling(config: ModelSettings, scaling: ModelSettings) -> RopeScaling:
    # An original length outside of the rope parameters takes precedence.
    original_length = config.integer("original_max_position_embeddings", scaling.integer("original_max_position_embeddings", 0))
    key = "rope_type" if scaling.has("rope_type") else "type"
    match scaling.text(key, "default"):
        # Older files name what only says that positions have axes.
        case "default" | "mrope":
            return RopeScaling()
        case "linear":
            return RopeScaling("linear", factor=scaling.positive("factor"), original_length=original_length)
        case "llama3":
            return _llama3(scaling, original_length)
        case "yarn":
            return _yarn(scaling, original_length, config.size("max_position_embeddings"))
        case _:
            raise scaling.wrong(key, "'default', 'linear', 'llama3' or 'yarn'")


def _llama3(scaling: ModelSettings, original_length: int) -> RopeScaling:
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    if high <= low:
        raise scaling.wrong("high_freq_factor", f"more than low_freq_factor, {low}")
    factor = scaling.positive("factor")
    return RopeScaling("llama3", factor=factor, original_length=original_length, low_freq_factor=low, high_freq_factor=high)


def _yarn(scaling: ModelSettings, original_length: int, trained_length: int) -> RopeScaling:
    def optional(key: str) -> float | None:
        return scaling.number(key) if scaling.has(key) else None

    return RopeScaling(
        "yarn",
        factor=scaling.positive("factor", trained_length / (original_length or trained_length)),
        original_length=original_length,
        beta_fast=scaling.positive("beta_fast", 32.0),
        beta_slow=scaling.positive("beta_slow", 1.0),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=scaling.flag("truncate", True),
    )


def _files(directory: Path) -> tuple[Path, ...]:
    if not (directory / INDEX).exists():
        return (directory / WEIGHTS,)
    index = read_settings(directory / INDEX)
    weight_map = index.values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(map(_is_file_name, weight_map.values())):
        raise index.wrong("weight_map", "a file name in the same directory for each weight")
    return tuple(directory / name for name in sorted(set(weight_map.values())))


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def _check_readable(file: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"--model {file.parent}: {file.name} is missing: expected weights in safetensors format")
    with _opened(file):
        pass


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"--model {file.parent}: {file.name} cannot be read as safetensors: {error}") from error


def _file_tensors(file: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """The name of each tensor, and what reads it."""
    with _opened(file) as weights:
        for name in weights.keys():  # noqa: SIM118, it is not a mapping
            yield name, functools.partial(_read, file, weights, name)


def _read(file: Path, weights: Any, name: str) -> torch.Tensor:
    tensor: torch.Tensor = weights.get_tensor(name)
    if tensor.dtype not in DTYPES:
        expected = ", ".join(str(dtype) for dtype in DTYPES)
        raise ConfigError(f"--model {file.parent}: {file.name}: {name} has type {tensor.dtype}: expected one of {expected}")
    return tensor
