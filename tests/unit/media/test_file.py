"""The file of a picture as it was sent: any part of it, its digest, and what is written, without decoding all of it."""

from __future__ import annotations

import base64
import os
import random
from pathlib import Path

import pytest

from penstock.media.file import PIECE_CHARACTERS, ImageFile, decode_base64
from penstock.media.formats import MAX_SEGMENTS, read_header
from pictures import noise, saved


def test_a_part_of_base64_is_that_part_of_the_file() -> None:
    draw = random.Random(1)
    for length in (0, 1, 2, 3, 4, 5, 100, 1000):
        data = draw.randbytes(length)
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        for file in (ImageFile(data), ImageFile(url, url.index(",") + 1), ImageFile(url.rstrip("="), url.index(",") + 1)):
            assert abs(file.size - length) <= 2
            for _ in range(50):
                start = draw.randrange(length + 5)
                end = start + draw.randrange(40)
                assert file.part(start, end) == data[start:end], (length, start, end)


def test_base64_may_have_lines() -> None:
    data = random.Random(2).randbytes(500)
    file = ImageFile(base64.encodebytes(data).decode())
    assert file.has_lines
    assert file.joined().part(0, 500) == data
    assert not file.joined().has_lines


@pytest.mark.parametrize("text", ["AAA*AAAA", "AA==AAAA", "A", "äAAA", "AAAAA"])
def test_what_is_not_base64_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it is not base64"):
        ImageFile(text).part(0, 6)


def test_a_file_is_written_and_hashed_in_pieces(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(PIECE_CHARACTERS * 2)
    text = base64.b64encode(data).decode()
    written, digests = [], set()
    for number, file in enumerate([ImageFile(data), ImageFile(text), ImageFile("data:;base64," + text, 13), ImageFile(data[:-1])]):
        path = tmp_path / str(number)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
        file.write(descriptor)
        os.close(descriptor)
        written.append(path.read_bytes())
        assert len(written[-1]) == file.stored
        digests.add(file.digest())
    assert written[0] == decode_base64(written[1]) == decode_base64(written[2]) == data
    assert len(digests) == 3, "the second and the third were sent with the same characters"


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("JPEG", {}), ("GIF", {}), ("WEBP", {}), ("WEBP", {"lossless": False})])
def test_a_header_tells_the_format_and_the_size(kind: str, options: dict[str, object]) -> None:
    for size in ((1, 1), (300, 7), (7, 300)):
        header = read_header(ImageFile(saved(noise(size=size), kind, **options)))
        assert (header.kind.upper(), header.width, header.height) == (kind, *size)


def test_a_webp_with_metadata_tells_its_size() -> None:
    assert read_header(ImageFile(saved(noise(size=(20, 30)), "WEBP", exif=b"Exif\0\0II*\0")))[1:] == (20, 30)


def test_a_jpeg_tells_its_size_after_its_metadata() -> None:
    plain = saved(noise(size=(20, 30)), "JPEG")
    segment = b"\xff\xe2" + (65_533).to_bytes(2) + bytes(65_531)
    assert read_header(ImageFile(plain[:2] + segment * 50 + b"\xff" * 3 + plain[2:]))[1:] == (20, 30)
    with pytest.raises(ValueError, match="has no width and height"):
        read_header(ImageFile(plain[:2] + b"\xff\xe2\0\2" * MAX_SEGMENTS + plain[2:]))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_header_that_ends_early_is_refused(kind: str) -> None:
    file = saved(noise(), kind)
    for length in range(24):
        with pytest.raises(ValueError, match=r"header|not a picture|is empty"):
            read_header(ImageFile(file[: min(length, 9)]))


def test_no_pixels_are_refused() -> None:
    png = saved(noise())
    with pytest.raises(ValueError, match="0 × 16 pixels"):
        read_header(ImageFile(png[:16] + bytes(4) + png[20:]))


@pytest.mark.parametrize("start", [b"", b"<svg xmlns=", b"BM\0\0", b"II*\0", b"%PDF-1.7", b"\0\0\0\x18ftypheic", b"\xff\xd8"])
def test_other_formats_are_refused(start: bytes) -> None:
    with pytest.raises(ValueError, match="expected a PNG, JPEG, WebP or GIF"):
        read_header(ImageFile(start))
