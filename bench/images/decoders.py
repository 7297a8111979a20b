"""Measures decoders of images, to choose one.

    python bench/images/decoders.py [--rounds N]

Each library that is installed decodes the same files to 8-bit RGB. Two figures for each: the CPU time, and for how long the GIL was held in
one go, which is how long an event loop in the same process would stand still. The files are a photograph-like picture of 12 million pixels,
a screenshot, and a small picture. Libraries other than Pillow are not needed by Penstock: install them somewhere else, and run this there:
pip install pillow opencv-python-headless imagecodecs 'pyvips[binary]' simplejpeg.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from PIL import Image, ImageDraw, ImageFilter

Decode = Callable[[bytes], object]
KINDS = ("JPEG", "PNG", "WEBP")
TICK_SECONDS = 0.0005


def photograph(width: int, height: int) -> Image.Image:
    """Smooth areas, edges and noise."""
    noise = Image.effect_noise((width, height), 40).filter(ImageFilter.GaussianBlur(2))
    gradient = Image.linear_gradient("L").resize((width, height))
    return Image.merge("RGB", (noise, gradient, Image.radial_gradient("L").resize((width, height))))


def screenshot(width: int, height: int) -> Image.Image:
    """Flat areas with text."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for row in range(0, height, 14):
        draw.text((8, row), f"{row:06d} the river carries water past the old stone bridge, morning light moves over paper " * 2, "black")
    return image


def files() -> dict[str, bytes]:
    made = {}
    for name, image in (
        ("photo 4000×3000", photograph(4000, 3000)),
        ("screen 1920×1080", screenshot(1920, 1080)),
        ("small 512×512", photograph(512, 512)),
    ):
        for kind in KINDS:
            file = io.BytesIO()
            image.save(file, kind, **({"quality": 90} if kind != "PNG" else {}))
            made[f"{name} {kind}"] = file.getvalue()
    return made


def pillow(file: bytes) -> object:
    with Image.open(io.BytesIO(file), formats=KINDS) as image:
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")


def others() -> dict[str, Decode]:
    """Those that are installed."""
    found: dict[str, Decode] = {}
    for name, make in (("opencv", _opencv), ("imagecodecs", _imagecodecs), ("pyvips", _pyvips), ("simplejpeg", _simplejpeg)):
        try:
            found[name] = make()
        except ImportError as missing:
            print(f"{name} is not installed: {missing}", file=sys.stderr)
    return found


def _opencv() -> Decode:
    cv2: Any = import_module("cv2")
    numpy: Any = import_module("numpy")
    cv2.setNumThreads(1)

    def decode(file: bytes) -> object:
        # It turns pictures upright by itself, and can do nothing else with their metadata.
        return cv2.cvtColor(cv2.imdecode(numpy.frombuffer(file, numpy.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)

    return decode


def _imagecodecs() -> Decode:
    library: Any = import_module("imagecodecs")
    by_start = {b"\xff\xd8": library.jpeg8_decode, b"\x89P": library.png_decode, b"RI": library.webp_decode}
    return lambda file: by_start[file[:2]](file)


def _pyvips() -> Decode:
    library: Any = import_module("pyvips")
    library.cache_set_max(0)
    return lambda file: library.Image.new_from_buffer(file, "", access="sequential").write_to_memory()


def _simplejpeg() -> Decode:
    library: Any = import_module("simplejpeg")

    def decode(file: bytes) -> object:
        if not file.startswith(b"\xff\xd8"):
            raise ValueError("only JPEG")
        return library.decode_jpeg(file)

    return decode


def measure(decode: Decode, file: bytes, rounds: int) -> tuple[float, float]:
    """Milliseconds of CPU time of a decode (median), and the longest time for which no other thread ran."""
    took, held = [], 0.0
    for _ in range(rounds):
        stop = threading.Event()
        gaps = [0.0]

        def watch(stop: threading.Event = stop, gaps: list[float] = gaps) -> None:
            last = time.perf_counter()
            while not stop.is_set():
                time.sleep(TICK_SECONDS)
                now = time.perf_counter()
                gaps[0] = max(gaps[0], now - last - TICK_SECONDS)
                last = now

        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.process_time()
        decode(file)
        took.append(time.process_time() - began)
        stop.set()
        watcher.join()
        held = max(held, gaps[0])
    return statistics.median(took) * 1000, held * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    decoders = {"Pillow": pillow, **others()}
    print("| file | " + " | ".join(f"{name}, ms (GIL held)" for name in decoders) + " |")
    print("|---|" + "---|" * len(decoders))
    for name, file in files().items():
        cells = []
        for decode in decoders.values():
            try:
                took, held = measure(decode, file, rounds)
                cells.append(f"{took:.1f} ({held:.0f})")
            except ValueError:
                cells.append("")
        print(f"| {name}, {len(file) / 1e6:.1f} MB | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
