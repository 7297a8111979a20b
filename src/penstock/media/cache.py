"""Pictures that may be sent again: those of each tenant, by the file that they were made from."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from penstock.media.picture import Picture

MAX_FILES = 4
"""By which a tenant finds one picture again. Their keys are a part of PICTURE_BYTES."""


class FileKey(NamedTuple):
    """What a picture was made from, and how. A tenant never finds those of another: `lane` and `root` are its own."""

    lane: str
    root: bytes
    rules: bytes
    is_low: bool
    digest: bytes


class PictureCache:
    """Finds a picture while it is cached, or while anybody else holds it. Whoever needs memory calls `evict` until there is enough.

    The tenant that has the most bytes in it loses the picture that it has not used for longest. A picture may come in any number of files:
    for each tenant the last MAX_FILES are remembered.
    """

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[FileKey, Picture] = WeakValueDictionary()
        self._files: WeakKeyDictionary[Picture, dict[str, list[FileKey]]] = WeakKeyDictionary()
        """The keys of each picture in `_alive`, by tenant, the least recently used first."""
        self._lanes: dict[str, OrderedDict[Picture, None]] = {}
        self._bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    @property
    def bytes(self) -> int:
        return sum(self._bytes.values())

    def get(self, key: FileKey) -> Picture | None:
        return self._alive.get(key)

    def put(self, key: FileKey, picture: Picture) -> None:
        """Now it is the one that was used last."""
        lane = self._lanes.setdefault(key.lane, OrderedDict())
        if picture not in lane:
            self._bytes[key.lane] = self._bytes.get(key.lane, 0) + picture.memory
        lane[picture] = None
        lane.move_to_end(picture)
        files = self._files.setdefault(picture, {}).setdefault(key.lane, [])
        if key in files:
            files.remove(key)
        elif len(files) == MAX_FILES:
            self._alive.pop(files.pop(0), None)
        files.append(key)
        self._alive[key] = picture

    def evict(self) -> bool:
        """Lets go of one picture. Its memory is free when no request uses it any more. Returns False if there is none."""
        if not self._lanes:
            return False
        name = max(self._bytes, key=self._bytes.__getitem__)
        lane = self._lanes[name]
        picture, _ = lane.popitem(last=False)
        self._bytes[name] -= picture.memory
        if not lane:
            del self._lanes[name], self._bytes[name]
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bytes of each tenant are those of its pictures, and each picture has few files."""
        assert self._bytes.keys() == self._lanes.keys()
        for name, lane in self._lanes.items():
            assert lane
            assert self._bytes[name] == sum(picture.memory for picture in lane)
        of_all = [(name, files) for of_picture in list(self._files.values()) for name, files in of_picture.items()]
        assert all(0 < len(files) <= MAX_FILES and all(key.lane == name for key in files) for name, files in of_all)
        assert {key for _, files in of_all for key in files} == set(self._alive)
