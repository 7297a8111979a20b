"""Server-sent events: bytes in, data payloads out."""

from __future__ import annotations


class EventParser:
    """Incremental: any cut of the same bytes gives the same payloads.

    Lines end with LF, CRLF or CR. An event's data lines are joined with LF; comments and other fields are ignored, and so
    is an event that no blank line ended.
    """

    __slots__ = ("_after_cr", "_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that these bytes complete."""
        if self._after_cr or b"\r" in data:
            data = self._with_plain_ends(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        payloads: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                payloads.append(b"\n".join(self._data))
                self._data.clear()
        return payloads

    def _with_plain_ends(self, data: bytes) -> bytes:
        """Every line end as LF. A CR ends its line at once; the LF that may follow, perhaps with the next bytes, is dropped."""
        if not data:
            return data
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
            self._after_cr = False
        if data:
            self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
