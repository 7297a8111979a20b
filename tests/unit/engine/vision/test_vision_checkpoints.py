"""A model for text and images on disk: its two parts are read alone, under any of its names, and what is not supported is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, LlamaConfig
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

from penstock.engine.checkpoints.checkpoint import open_checkpoint
from penstock.engine.fingerprint import image_fingerprint, kv_fingerprint
from penstock.engine.model import Model
from penstock.engine.shape import joined_axes, mixed_axes
from penstock.engine.vision.shape import Encoder, Idefics3Shape, PixelScale, Qwen25VLShape, QwenVLShape
from penstock.engine.vision.tower import make_tower
from penstock.media.families.make import read_rules
from penstock.wire.errors import ConfigError
from tiny_models import make_model
from tiny_vision import KINDS, Kind, vision_model

CPU = torch.device("cpu")
HALVES = PixelScale(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
Tensors = dict[str, torch.Tensor]


def copy(kind: Kind, folder: Path, rename: Callable[[str], str] = str) -> Path:
    directory = Path(shutil.copytree(vision_model(kind), folder / "model"))
    file = directory / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file)
    return directory


def change(directory: Path, part: str, file: str = "config.json", **values: Any) -> None:
    """Changes settings, those of a part of the file if it is named. None takes one away."""
    settings = json.loads((directory / file).read_text())
    target = settings[part] if part else settings
    target |= values
    for key in [key for key, value in target.items() if value is None]:
        del target[key]
    (directory / file).write_text(json.dumps(settings))


def parts(directory: Path) -> tuple[Tensors, Tensors]:
    checkpoint = open_checkpoint(directory)
    return dict(checkpoint.tensors()), dict(checkpoint.tower_tensors())


def same(found: tuple[Tensors, Tensors], expected: tuple[Tensors, Tensors]) -> bool:
    return all(
        one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one) for one, other in zip(found, expected, strict=True)
    )


def test_the_shapes_of_towers() -> None:
    assert open_checkpoint(vision_model("idefics3")).tower == Idefics3Shape(Encoder(64, 2, 4, 128, 8), HALVES, 128, 2, 64, 8)
    assert open_checkpoint(vision_model("qwen3_vl")).tower == QwenVLShape(Encoder(64, 3, 4, 128, 16), HALVES, 128, 2, 8, 2, (0, 1))
    assert open_checkpoint(vision_model("qwen3_vl")).shape.rope_axes == (0, 1, 2) * 5 + (0,)
    assert open_checkpoint(vision_model("idefics3")).end_ids == {2}


@pytest.mark.parametrize("kind", KINDS)
def test_each_part_is_read_alone(kind: Kind, tmp_path: Path) -> None:
    text, tower = parts(copy(kind, tmp_path))
    assert len(text) + len(tower) == len(load_file(vision_model(kind) / "model.safetensors"))
    assert {name.split(".")[0] for name in text} == {"model", "lm_head"}
    assert {name.split(".")[0] for name in tower} <= {"visual", "vision_model", "connector"}


@pytest.mark.parametrize("kind", KINDS)
def test_older_names_of_weights_are_known(kind: Kind, tmp_path: Path) -> None:
    def rename(name: str) -> str:
        older = re.sub(r"^model\.(vision_model|connector|visual)", r"\1", name)
        older = re.sub(r"^model\.(language|text)_model", "language_model.model", older)
        return re.sub(r"^lm_head", "language_model.lm_head", older)

    assert same(parts(copy(kind, tmp_path, rename)), parts(vision_model(kind)))


def test_older_files_of_qwen2_5_vl_have_no_text_config(tmp_path: Path) -> None:
    def rename(name: str) -> str:
        return re.sub(r"^model\.(visual)", r"\1", re.sub(r"^model\.language_model", "model", name))

    directory = copy("qwen2_5_vl", tmp_path, rename)
    text = json.loads((directory / "config.json").read_text())["text_config"]
    rope = {"type": "mrope", "mrope_section": [6, 5, 5]}
    change(directory, "", **{**text, "text_config": None, "rope_parameters": None, "rope_scaling": rope, "model_type": "qwen2_5_vl"})
    assert same(parts(directory), parts(vision_model("qwen2_5_vl")))
    found, expected = open_checkpoint(directory), open_checkpoint(vision_model("qwen2_5_vl"))
    assert (found.shape, found.tower) == (expected.shape, expected.tower)
    pixels = replace(HALVES, mean=(0.48, 0.46, 0.41))
    assert found.tower == Qwen25VLShape(Encoder(64, 3, 4, 128, 14, gelu="none"), pixels, 128, 2, 2, frozenset({1}))
    assert found.shape.rope_axes == (0,) * 6 + (1,) * 5 + (2,) * 5


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_how_axes_are_arranged_may_be_left_out(kind: Kind, tmp_path: Path) -> None:
    """Plain positions instead would be wrong answers about images, without an error."""
    directory = copy(kind, tmp_path)
    change(directory, "text_config", rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]})
    assert open_checkpoint(directory).shape.rope_axes == open_checkpoint(vision_model(kind)).shape.rope_axes
    change(directory, "text_config", rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, head_dim=128)
    axes = open_checkpoint(directory).shape.rope_axes
    assert axes == {"qwen2_5_vl": joined_axes([16, 24, 24]), "qwen3_vl": mixed_axes([24, 20, 20])}[kind]


def test_smolvlm_is_the_same_model(tmp_path: Path) -> None:
    directory = copy("idefics3", tmp_path)
    change(directory, "", architectures=["SmolVLMForConditionalGeneration"], model_type="smolvlm")
    assert open_checkpoint(directory).tower == open_checkpoint(vision_model("idefics3")).tower


def test_what_files_leave_out_is_as_in_transformers(tmp_path: Path) -> None:
    """SmolVLM's files do not say how many layers its tower has, Idefics3's not what is as in Llama's own code."""
    directory = copy("idefics3", tmp_path)
    change(directory, "vision_config", num_hidden_layers=None, intermediate_size=None, hidden_act=None, layer_norm_eps=None)
    change(directory, "text_config", hidden_size=None, num_hidden_layers=None, intermediate_size=None, max_position_embeddings=None)
    checkpoint = open_checkpoint(directory)
    vision, text = Idefics3VisionConfig(), LlamaConfig()
    assert checkpoint.tower is not None
    assert checkpoint.tower.encoder == Encoder(64, vision.num_hidden_layers, 4, vision.intermediate_size, 8)
    found = checkpoint.shape
    assert (found.hidden_size, found.layers, found.intermediate_size) == (text.hidden_size, text.num_hidden_layers, text.intermediate_size)
    assert found.trained_length == text.max_position_embeddings


def test_settings_of_the_processor_may_be_inside_of_others(tmp_path: Path) -> None:
    directory = copy("qwen3_vl", tmp_path)
    inner = json.loads((directory / "preprocessor_config.json").read_text())
    (directory / "preprocessor_config.json").unlink()
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": inner | {"do_normalize": False}}))
    tower = open_checkpoint(directory).tower
    assert tower is not None
    assert tower.pixels == PixelScale(1 / 255, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_of_two_files_of_the_processor_the_newer_kind_counts(tmp_path: Path) -> None:
    """As in transformers. The front end goes by the same one: the pixels that it cuts are those that the tower normalises."""
    directory = copy("qwen3_vl", tmp_path)
    inner = json.loads((directory / "preprocessor_config.json").read_text())
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": inner | {"image_mean": [0.1, 0.2, 0.3]}}))
    tower, rules = open_checkpoint(directory).tower, read_rules(directory)
    assert tower is not None
    assert rules is not None
    reference: Any = AutoImageProcessor
    assert tower.pixels.mean == (0.1, 0.2, 0.3) == tuple(reference.from_pretrained(directory).image_mean)
    assert [rules.settings[f"mean_{index}"] for index in range(3)] == [0.1, 0.2, 0.3]


PROCESSOR = "preprocessor_config.json"


@pytest.mark.parametrize(
    ("kind", "part", "file", "values", "message"),
    [
        ("idefics3", "", "config.json", {"architectures": ["LlavaForConditionalGeneration"]}, "architectures is .*: expected one of"),
        ("idefics3", "", "config.json", {"vision_config": None}, "vision_config is None: expected an object"),
        ("idefics3", "text_config", "config.json", {"model_type": "mistral"}, "text_config: model_type is 'mistral': expected 'llama'"),
        ("idefics3", "vision_config", "config.json", {"hidden_act": "relu"}, "vision_config: hidden_act is 'relu': expected one of"),
        ("idefics3", "vision_config", "config.json", {"num_attention_heads": 5}, "num_attention_heads is 5: expected a divisor"),
        ("idefics3", "vision_config", "config.json", {"num_channels": 1}, "num_channels is 1: expected 3"),
        (
            "idefics3",
            "",
            PROCESSOR,
            {"max_image_size": {"longest_edge": 60}},
            "max_image_size is .*: expected a multiple of 2 patches of 8",
        ),
        ("idefics3", "", PROCESSOR, {"image_mean": [0.5]}, "image_mean is .*: expected a number for each of red, green and blue"),
        ("qwen3_vl", "", PROCESSOR, {"patch_size": 14}, "patch_size is 14: expected 16, as in the tower's settings"),
        ("qwen3_vl", "", PROCESSOR, {"image_std": [0.5, 0.0, 0.5]}, "image_std is .*: expected a number for each"),
        ("qwen3_vl", "vision_config", "config.json", {"num_position_embeddings": 60}, "num_position_embeddings is 60: expected a square"),
        ("qwen3_vl", "vision_config", "config.json", {"out_hidden_size": 64}, "out_hidden_size is 64: expected 128"),
        ("qwen3_vl", "vision_config", "config.json", {"deepstack_visual_indexes": [1, 3]}, "deepstack_visual_indexes is .*: expected some"),
        ("qwen2_5_vl", "vision_config", "config.json", {"window_size": 20}, "window_size is 20: expected at least 28"),
        ("qwen2_5_vl", "vision_config", "config.json", {"hidden_act": "gelu"}, "hidden_act is 'gelu': expected one of silu"),
        ("qwen3_vl", "text_config", "config.json", {"head_dim": 64}, "mrope_section is .*: expected three numbers whose sum is 32"),
    ],
)
def test_what_is_not_supported_is_named(kind: Kind, part: str, file: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = copy(kind, tmp_path)
    change(directory, part, file, **values)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(directory)


def test_a_model_without_a_processor_is_refused(tmp_path: Path) -> None:
    directory = copy("idefics3", tmp_path)
    (directory / PROCESSOR).unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config.json is missing: expected the settings of the model's image processor"):
        open_checkpoint(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_too_few_or_too_many_is_refused(kind: Kind, tmp_path: Path) -> None:
    """A part of a tower that is ignored would be wrong features."""
    directory = copy(kind, tmp_path)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    prefix = "model.visual." if kind == "qwen3_vl" else "model.vision_model."
    save_file(tensors | {f"{prefix}more.weight": torch.ones(4)}, file)
    with pytest.raises(ConfigError, match="weights that its configuration does not need, such as"):
        make_tower(open_checkpoint(directory), torch.float32, CPU)
    missing = next(name for name in tensors if name.startswith(prefix))
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, file)
    with pytest.raises(ConfigError, match="the model has no weight"):
        make_tower(open_checkpoint(directory), torch.float32, CPU)


def test_the_fingerprint_of_features_knows_weights_and_settings() -> None:
    checkpoint = open_checkpoint(vision_model("qwen3_vl"))
    weights = dict(checkpoint.tower_tensors())
    tower = checkpoint.tower
    assert isinstance(tower, QwenVLShape)
    made = image_fingerprint(tower, weights.items(), torch.float32)
    assert made == image_fingerprint(tower, checkpoint.tower_tensors(), torch.float32)
    others = [image_fingerprint(replace(tower, pixels=replace(HALVES, factor=1.0)), weights.items(), torch.float32)]
    others.append(image_fingerprint(tower, weights.items(), torch.bfloat16))
    for name in ("visual.patch_embed.proj.weight", "visual.blocks.1.norm2.bias"):
        changed = weights[name].clone()
        changed.view(-1)[-1] += 1e-3
        others.append(image_fingerprint(tower, (weights | {name: changed}).items(), torch.float32))
    assert len({made, *others}) == 5


def test_kv_depends_on_axes_and_on_what_makes_features() -> None:
    checkpoint = open_checkpoint(vision_model("qwen3_vl"))

    def fingerprint(images: bytes = b"", **changes: Any) -> bytes:
        model = Model(replace(checkpoint.shape, **changes), checkpoint.tensors(), 512, torch.float32, CPU)
        return kv_fingerprint(model, 16, is_reproducible=False, images=images)

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(b"a"), fingerprint(b"b"), fingerprint(rope_axes=(0,) * 6 + (1,) * 5 + (2,) * 5)}) == 4


def test_a_model_for_text_has_no_tower(tmp_path: Path) -> None:
    assert make_model("llama").shape.rope_axes == ()
    directory = copy("idefics3", tmp_path)
    text = json.loads((directory / "config.json").read_text())["text_config"]
    change(directory, "", architectures=["LlamaForCausalLM"], **text)
    checkpoint = open_checkpoint(directory)
    assert list(checkpoint.tower_tensors()) == []
    with pytest.raises(ConfigError, match="the model has no vision tower"):
        make_tower(checkpoint, torch.float32, CPU)
