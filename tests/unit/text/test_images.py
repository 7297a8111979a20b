"""Images in texts."""

from __future__ import annotations

import os

from penstock.text.images import IMAGE_MARK, MARK_CHARACTERS, image_mark, marked_name, named_mark
from penstock.wire.images import IMAGE_NAME_BYTES


def test_marks_are_found_and_have_one_length() -> None:
    names = [os.urandom(IMAGE_NAME_BYTES) for _ in range(3)]
    marks = [image_mark(0), image_mark(12), *map(named_mark, names)]
    assert {len(mark) for mark in marks} == {MARK_CHARACTERS}
    assert [found.group() for found in IMAGE_MARK.finditer("a".join(marks))] == marks
    assert [marked_name(mark) for mark in marks[2:]] == names
