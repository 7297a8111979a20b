"""Families of image processors: what stands for an image in a prompt, and its pixels."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from PIL import Image

from penstock.media.families import simulator
from penstock.media.families.make import layout, prepare, read_rules
from penstock.wire.errors import ConfigError, RequestError
from penstock.wire.images import ImageRules

NAME = bytes(range(16))


@pytest.mark.parametrize(
    ("size", "grid"),
    [((1, 1), (1, 1)), ((16, 16), (1, 1)), ((17, 16), (1, 2)), ((160, 32), (2, 10)), ((100_000, 1), (1, 64)), ((9999, 9999), (64, 64))],
)
def test_simulated_images_have_a_position_for_each_patch(size: tuple[int, int], grid: tuple[int, int]) -> None:
    made = layout(simulator.make_rules(), NAME, size)
    assert (made.grid, made.positions, made.size) == (grid, grid[0] * grid[1], size)


def test_pixels_are_three_bytes_for_each_pixel_of_the_layout() -> None:
    rules = simulator.make_rules()
    image = Image.new("RGB", (5, 7), (1, 2, 3))
    assert prepare(rules, image) == prepare(structs.replace(rules, is_prepared=False), image) == bytes([1, 2, 3]) * 35


def test_an_unknown_family_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="'other': expected one of"):
        layout(ImageRules("other", {}, ""), NAME, (1, 1))


def _qwen_processor(**settings: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**settings)


def _idefics3_processor(**settings: Any) -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(**settings)


def _sizes() -> list[tuple[int, int]]:
    """Small, odd, long and large ones, the same in every run."""
    numbers = random.Random(17)
    drawn = [(numbers.randint(1, 300), numbers.randint(1, 300)) for _ in range(40)]
    edges = [(1, 1), (1, 2), (2, 1), (3, 3), (63, 64), (64, 64), (65, 64), (128, 128), (127, 129), (1, 150), (150, 1), (1000, 7), (5, 999)]
    return [*drawn, *edges, (1600, 1200), (641, 1999)]


def _picture(size: tuple[int, int]) -> Image.Image:
    """Noise: a pixel at another place shows."""
    return Image.frombytes("RGB", size, random.Random(repr(size)).randbytes(3 * size[0] * size[1]))


def _as_bytes(values: Any, settings: Mapping[str, float]) -> Any:
    """Undoes the normalisation. Colours are in the third dimension from the end."""
    import numpy as np

    mean, std = (np.array([settings[f"{key}_{index}"] for index in range(3)])[:, None, None] for key in ("mean", "std"))
    return np.rint((np.asarray(values, dtype=np.float64) * std + mean) / settings["rescale"]).astype(np.uint8)


def _qwen_pixels(made: Any, patch: int, merge: int, frames: int, settings: Mapping[str, float]) -> bytes:
    """The picture that was cut into patches."""
    import numpy as np

    (_, rows, columns) = made["image_grid_thw"][0]
    cut = np.asarray(made["pixel_values"]).reshape(rows // merge, columns // merge, merge, merge, 3, frames, patch, patch)
    whole = cut[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)
    return bytes(_as_bytes(whole, settings).transpose(1, 2, 0).tobytes())


@pytest.mark.parametrize(("patch", "least", "most"), [(14, 56 * 56, 28 * 28 * 20), (16, 32 * 32, 32 * 32 * 64), (8, 40_000, 50_000)])
def test_pictures_for_qwen_are_what_the_processor_makes(patch: int, least: int, most: int, tmp_path: Path) -> None:
    processor = _qwen_processor(patch_size=patch, size={"shortest_edge": least, "longest_edge": most})
    processor.save_pretrained(tmp_path)
    rules = read_rules(tmp_path)
    assert rules is not None
    assert rules.family == "qwen_vl"
    for size in _sizes():
        picture = _picture(size)
        if max(size) > 200 * min(size):
            with pytest.raises(ValueError, match="aspect ratio"):
                processor(picture)
            with pytest.raises(RequestError, match="at most 200 times"):
                layout(rules, NAME, size)
            continue
        expected = processor(picture, return_tensors="np")
        made, pixels = layout(rules, NAME, size), prepare(rules, picture)
        _, rows, columns = (int(each) for each in expected["image_grid_thw"][0])
        assert (made.grid, made.positions) == ((rows // 2, columns // 2), rows * columns // 4)
        assert made.size == (columns * patch, rows * patch)
        assert pixels == _qwen_pixels(expected, patch, 2, 2, rules.settings), size


@pytest.mark.parametrize(
    ("longest", "tile", "splits"), [(128, 64, True), (192, 64, True), (64, 64, True), (200, 72, True), (150, 48, False)]
)
def test_tiles_for_idefics3_are_what_the_processor_makes(longest: int, tile: int, splits: bool, tmp_path: Path) -> None:
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    processor = _idefics3_processor(**sizes, do_image_splitting=splits)
    processor.save_pretrained(tmp_path)
    rules = read_rules(tmp_path)
    assert rules is not None
    assert rules.family == "idefics3"
    for size in _sizes():
        picture = _picture(size)
        expected = processor([[picture]], return_tensors="np", return_row_col_info=True)
        made, pixels = layout(rules, NAME, size), prepare(rules, picture)
        tiles = _as_bytes(expected["pixel_values"][0], rules.settings)
        assert made.grid == (expected["rows"][0][0], expected["cols"][0][0])
        assert made.positions == 169 * len(tiles)
        assert made.size == (tile, tile * len(tiles))
        assert pixels == tiles.transpose(0, 2, 3, 1).tobytes(), size


def test_a_picture_larger_than_idefics3_ever_shows(tmp_path: Path) -> None:
    processor = _idefics3_processor(size={"longest_edge": 5000}, max_image_size={"longest_edge": 512})
    processor.save_pretrained(tmp_path)
    rules = read_rules(tmp_path)
    assert rules is not None
    picture = _picture((90, 1))
    expected = processor([[picture]], return_tensors="np", return_row_col_info=True)
    assert layout(rules, NAME, (90, 1)).grid == (expected["rows"][0][0], expected["cols"][0][0]) == (1, 8)
    assert prepare(rules, picture) == _as_bytes(expected["pixel_values"][0], rules.settings).transpose(0, 2, 3, 1).tobytes()


def _write(directory: Path, **files: object) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 100, "max_pixels": 10_000}
IDEFICS = {"image_processor_type": "Idefics3ImageProcessor"}


@pytest.mark.parametrize(
    "given",
    [
        QWEN,
        {**QWEN, "size": {"shortest_edge": 5, "longest_edge": 6}},
        {"image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 100, "longest_edge": 10_000}},
        {"processor_class": "Qwen3VLProcessor", "size": {"min_pixels": 100, "max_pixels": 10_000}},
    ],
)
def test_old_and_new_spellings_of_the_same_settings(given: dict[str, object], tmp_path: Path) -> None:
    rules = read_rules(_write(tmp_path, preprocessor_config=given))
    assert rules == read_rules(_write(tmp_path, processor_config={"image_processor": given}, preprocessor_config={"size": 7}))
    assert rules is not None
    assert (rules.settings["min_pixels"], rules.settings["max_pixels"]) == (100, 10_000)


def test_smolvlm_has_its_number_of_positions_from_its_processor_or_its_model(tmp_path: Path) -> None:
    given = {"image_processor_type": "SmolVLMImageProcessorFast", "max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}}
    vision = {"vision_config": {"patch_size": 16}, "scale_factor": 4}
    said = read_rules(_write(tmp_path, preprocessor_config=given, processor_config={"image_seq_len": 64}))
    made = read_rules(_write(tmp_path, processor_config={}, config=vision))
    assert said == made
    assert said is not None
    assert said.settings["tile_positions"] == 64


@pytest.mark.parametrize(
    ("given", "processor", "said"),
    [
        ({**QWEN, "patch_size": 0}, {}, "`patch_size` is 0: expected a whole number"),
        ({**QWEN, "merge_size": "2"}, {}, "`merge_size` is '2'"),
        ({**QWEN, "min_pixels": 10_001}, {}, "`min_pixels` is over its `max_pixels`"),
        ({**QWEN, "size": [1, 2]}, {}, "`size` is"),
        ({**QWEN, "image_mean": [0.5]}, {}, "`image_mean` is"),
        ({**QWEN, "resample": 9}, {}, "`resample` is 9"),
        ({**QWEN, "do_resize": False}, {}, "`do_resize` is false"),
        ({**IDEFICS, "size": {"height": 4, "width": 4}}, {}, "`size` is"),
        (IDEFICS, {"image_seq_len": 63}, "`image_seq_len` is 63, but the model makes 64"),
    ],
)
def test_settings_that_cannot_be_followed_are_named(given: object, processor: object, said: str, tmp_path: Path) -> None:
    model = {"vision_config": {"patch_size": 22}, "scale_factor": 2}
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_rules(_write(tmp_path, preprocessor_config=given, processor_config=processor, config=model))


def test_a_model_whose_processor_is_not_known_reads_only_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_rules(tmp_path) is None
    assert not caplog.records
    assert read_rules(_write(tmp_path, preprocessor_config={"image_processor_type": "CLIPImageProcessor"})) is None
    assert "CLIPImageProcessor is not known" in caplog.text


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json cannot be read"):
        read_rules(tmp_path)


def test_sides_too_unequal_for_idefics3(tmp_path: Path) -> None:
    # 98 * (1 / 98) is below 1 in floating point: the processor wants a picture without width.
    processor = _idefics3_processor(size={"longest_edge": 98}, max_image_size={"longest_edge": 49})
    processor.save_pretrained(tmp_path)
    rules = read_rules(tmp_path)
    assert rules is not None
    with pytest.raises(ValueError, match="size must be"):
        processor([[_picture((1, 3000))]])
    with pytest.raises(RequestError, match="1 x 3000 pixels: its sides are too unequal"):
        layout(rules, NAME, (1, 3000))
