"""From a file to pixels: equal pictures have equal names, different ones never, and a model sees what a person would."""

from __future__ import annotations

import io

import pytest
from PIL import Image, ImageOps

from penstock.media.decode import LOW_PIXELS, Decoded, decode
from penstock.media.families.simulator import make_rules
from penstock.media.file import ImageFile
from penstock.media.formats import read_header
from penstock.wire.images import seal_of
from pictures import noise, saved

RULES = make_rules()
ORIENTATION = 0x0112


def decoded(file: bytes, is_low: bool = False) -> Decoded:
    header = read_header(ImageFile(file))
    return decode(file, header.kind, header.pixels, is_low, RULES)


def test_equal_pixels_of_two_formats_are_one_picture() -> None:
    image = noise()
    png, webp, small = decoded(saved(image)), decoded(saved(image, "WEBP")), decoded(saved(image, optimize=True))
    assert png == webp == small
    assert png.pixels == image.tobytes()


def test_metadata_that_does_not_change_the_picture_does_not_change_its_name() -> None:
    assert decoded(saved(noise(), dpi=(300, 300))) == decoded(saved(noise()))


def test_what_changes_the_picture_changes_its_content() -> None:
    image = noise()
    other = image.copy()
    other.putpixel((5, 5), (1, 2, 3))
    palette = noise("P")
    repainted = palette.copy()
    repainted.putpalette(bytes(768))
    pictures = [
        *(saved(each) for each in (image, other, noise("L"), noise("LA"), noise("RGBA"), noise("I;16"), palette, repainted)),
        saved(image.transpose(Image.Transpose.ROTATE_90)),
        saved(Image.frombytes("RGB", (16, 24), image.tobytes())),  # the same bytes with other dimensions
        saved(image.convert("RGBA")),
        saved(palette, transparency=3),
        saved(palette, transparency=bytes([0, 255, 7])),
        saved(image, transparency=(1, 2, 3)),
        saved(noise("L"), transparency=9),
        saved(noise("CMYK"), "JPEG"),
        saved(noise("L"), "JPEG"),
    ]
    assert len({decoded(file).content for file in pictures}) == len(pictures)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_turned_upright(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = saved(noise(), kind, exif=exif)
    with Image.open(io.BytesIO(file)) as opened:
        expected = ImageOps.exif_transpose(opened)
    found = decoded(file)
    assert (found.size, found.pixels) == (expected.size, expected.tobytes())


def test_what_is_transparent_shows_a_white_ground() -> None:
    image = Image.new("RGBA", (2, 1), (200, 0, 0, 255))
    image.putpixel((1, 0), (0, 200, 0, 0))
    assert list(decoded(saved(image)).pixels) == [200, 0, 0, 255, 255, 255]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert list(decoded(saved(palette, "GIF", transparency=1)).pixels) == [10, 20, 30, 255, 255, 255]


def test_sixteen_bits_become_eight() -> None:
    image = Image.frombytes("I;16", (3, 1), bytes([0, 0, 0, 128, 255, 255]))
    assert list(decoded(saved(image)).pixels) == [0, 0, 0, 128, 128, 128, 255, 255, 255]


def test_low_detail_fits_into_a_square() -> None:
    image = noise(size=(1200, 300))
    assert decoded(saved(image), is_low=True).size == (LOW_PIXELS, 128)
    assert decoded(saved(noise(size=(3, 3000))), is_low=True).size == (1, LOW_PIXELS)
    assert decoded(saved(image), is_low=True).content == decoded(saved(image)).content, "the name has the detail besides"


def test_of_an_animation_the_first_frame_is_read() -> None:
    frames = [noise("P", seed=seed).convert("RGB") for seed in range(3)]
    for kind in ("GIF", "WEBP", "PNG"):
        one = decoded(saved(frames[0].quantize(16) if kind == "GIF" else frames[0], kind))
        many = [each.quantize(16) if kind == "GIF" else each for each in frames]
        assert decoded(saved(many[0], kind, save_all=True, append_images=many[1:])).pixels == one.pixels, kind


def test_more_pixels_than_the_header_says_are_refused() -> None:
    """The frame of a GIF may be larger than its screen. Pillow makes the screen larger then."""
    file = bytearray(saved(noise("P", (4, 4)), "GIF"))
    frame = file.index(b",\0\0\0\0\4\0\4\0")
    file[frame + 5 : frame + 9] = (60_000).to_bytes(2, "little") * 2
    with pytest.raises(ValueError, match="60000 × 60000 pixels, more than its header says"):
        decoded(bytes(file))


def test_the_seal_is_that_of_the_pixels() -> None:
    found = decoded(saved(noise()))
    seal = seal_of((24, 16))
    seal.update(found.pixels)
    assert found.seal == seal.digest()
