"""Measures vision towers with random weights on this machine's CPU, by turns with transformers, and says what takes their time.

    python bench/images/tower.py [idefics3] [qwen3_vl] [--rounds 3] [--threads 1]

idefics3   SmolVLM-256M's tower: 12 layers of 768, tiles of 512 pixels in patches of 16, 64 positions to a tile
qwen3_vl   Qwen3-VL-2B's tower: 24 layers of 1,024, one picture of 512 pixels in patches of 16, 256 positions

A tile of the first and the picture of the second have 1,024 patches each. Time of the processor counts, and the least of all rounds, since
others use the machine, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from penstock.engine.vision.idefics3 import Idefics3Tower
from penstock.engine.vision.qwen_vl import QwenVLTower
from penstock.engine.vision.shape import Encoder, Idefics3Shape, PixelScale, QwenVLShape
from penstock.engine.vision.tower import Tower

CPU = torch.device("cpu")
SIDE, PATCH, WIDTH = 512, 16, 576
SCALE = PixelScale(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
TEXT = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 9, "vocab_size": 64}
PRODUCTS = ("mm", "attention", "gemm")


def weights(model: Any, prefixes: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        if name.removeprefix("model.").startswith(prefixes):
            yield name.removeprefix("model."), tensor


def idefics3() -> tuple[Tower, tuple[bytes, tuple[int, int]], Callable[[], Any]]:
    vision = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    sizes = {"image_size": SIDE, "patch_size": PATCH}
    config = Idefics3Config(vision_config={**vision, **sizes}, text_config={"model_type": "llama", **TEXT}, scale_factor=4)
    model: Any = Idefics3ForConditionalGeneration(config).eval()  # type: ignore[no-untyped-call]
    shape = Idefics3Shape(Encoder(768, 12, 12, 3072, PATCH), SCALE, WIDTH, 4, SIDE, SIDE // PATCH)
    tower = Idefics3Tower(shape, weights(model, shape.prefixes), torch.float32, CPU)
    pixels = torch.randint(256, (1, SIDE, SIDE, 3), dtype=torch.uint8)
    normal = pixels.permute(0, 3, 1, 2)[None].float() / 127.5 - 1
    return tower, (pixels.numpy().tobytes(), (0, 0)), lambda: model.model.get_image_features(normal)


def qwen3_vl() -> tuple[Tower, tuple[bytes, tuple[int, int]], Callable[[], Any]]:
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16, "out_hidden_size": WIDTH}
    levels = (5, 11, 17)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
    text = {**TEXT, "head_dim": 64, "num_key_value_heads": 3, "rope_parameters": rope}
    model: Any = Qwen3VLForConditionalGeneration(  # type: ignore[no-untyped-call]
        Qwen3VLConfig(vision_config={**vision, "deepstack_visual_indexes": list(levels)}, text_config=text)
    ).eval()
    shape = QwenVLShape(Encoder(1024, 24, 16, 4096, PATCH), SCALE, WIDTH, 2, 48, 2, levels)
    tower = QwenVLTower(shape, weights(model, shape.prefixes), torch.float32, CPU)
    side = SIDE // PATCH
    pixels = torch.randint(256, (SIDE, SIDE, 3), dtype=torch.uint8)
    normal = torch.randn(side * side, 3 * 2 * PATCH**2)
    grid = torch.tensor([[1, side, side]])
    return tower, (pixels.numpy().tobytes(), (side // 2, side // 2)), lambda: model.model.get_image_features(normal, grid)


def seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    with torch.inference_mode():
        run()
    return time.process_time() - began


def shares(run: Callable[[], Any]) -> str:
    """What takes the time, by operation."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    found = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    whole = sum(found.values())
    products = sum(spent for key, spent in found.items() if any(part in key for part in PRODUCTS))
    most = sorted(found.items(), key=lambda item: -item[1])[:8]
    return f"products and attention {products / whole:.0%}; " + ", ".join(f"{key} {spent / whole:.0%}" for key, spent in most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which towers; both if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    makers = {"idefics3": idefics3, "qwen3_vl": qwen3_vl}
    for name, make in ((name, makers[name]) for name in settings.names or makers):
        tower, image, other = make()
        times = [(seconds(lambda: tower.encode([image])), seconds(other)) for _ in range(settings.rounds)]  # noqa: B023
        ours, theirs = (min(column) * 1000 for column in zip(*times, strict=True))
        print(f"{name}: {ours:.0f} CPU-ms for 1,024 patches, transformers {theirs:.0f}; {shares(lambda: tower.encode([image]))}")  # noqa: B023


if __name__ == "__main__":
    main()
