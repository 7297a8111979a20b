"""Pictures that may be sent again: those of each tenant, by the file that they were made from."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple
from weakref import WeakValueDictionary

from penstock.media.picture import Picture


class FileKey(NamedTuple):
    """What a picture was made from, and how. A tenant never finds those of another: `lane` and `root` are its own."""

    lane: str
    root: bytes
    rules: bytes
    is_low: bool
    digest: bytes


class PictureCache:
    """Finds a picture while it is cached, or while anybody else holds it. Whoever needs memory calls `evict` until there is enough.

    The tenant that has the most bytes in it loses the picture that it has not used for longest.
    """

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[FileKey, Picture] = WeakValueDictionary()
        self._lanes: dict[str, OrderedDict[FileKey, Picture]] = {}
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
        if key not in lane:
            self._bytes[key.lane] = self._bytes.get(key.lane, 0) + len(picture.pixels)
        lane[key] = self._alive[key] = picture
        lane.move_to_end(key)

    def evict(self) -> bool:
        """Lets go of one picture. Its memory is free when no request uses it any more. Returns False if there is none."""
        if not self._lanes:
            return False
        name = max(self._bytes, key=self._bytes.__getitem__)
        lane = self._lanes[name]
        _, picture = lane.popitem(last=False)
        self._bytes[name] -= len(picture.pixels)
        if not lane:
            del self._lanes[name], self._bytes[name]
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bytes of each tenant are those of its pictures."""
        assert self._bytes.keys() == self._lanes.keys()
        for name, lane in self._lanes.items():
            assert lane
            assert self._bytes[name] == sum(len(picture.pixels) for picture in lane.values())
            assert all(key.lane == name for key in lane)
