"""Events of a response's stream: typed, and numbered from 0 without gaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Events:
    """Renders the events of one response. Each is given the next number."""

    def __init__(self) -> None:
        self.count = 0

    def event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        number = self.count
        self.count += 1
        return encoded_event(kind, number, fields)

    def delta(self, opening: bytes, delta: str, closing: bytes) -> bytes:
        """An event of which all but its delta and its number is encoded already."""
        number = self.count
        self.count += 1
        return b'%b%b%b,"sequence_number":%d}\n\n' % (opening, msgspec.json.encode(delta), closing, number)

    def take_back(self) -> None:
        """The last event was not sent: another will have its number."""
        self.count -= 1


def encoded_event(kind: str, number: int, fields: Mapping[str, Any]) -> bytes:
    data = msgspec.json.encode({"type": kind, **fields, "sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def delta_opening(kind: str, fields: Mapping[str, Any]) -> bytes:
    """What `Events.delta` begins with."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b'event: %b\ndata: %b,"delta":' % (kind.encode(), data[:-1])
