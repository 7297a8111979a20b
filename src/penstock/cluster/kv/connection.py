"""One end of an established connection for KV: messages, and the bytes of blocks straight from and into slots.

Nothing but messages is queued in this process. The bytes of blocks go from the slot to the kernel when the socket takes them, so once
they are sent nothing refers to the slot any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from penstock.cluster.kv.frames import LENGTH, MAX_MESSAGE_BYTES, KvMessage, decode, encode, length_of
from penstock.cluster.links.link import is_host_gone
from penstock.cluster.links.security import reason_of
from penstock.wire.errors import FrameMalformed, LinkBroken, LinkError, PeerLeft
from penstock.wire.messages import Goodbye

BUFFER_BYTES = 64 * 1024
MAX_VIEWS = 512
"""Pieces of memory per system call. Linux takes 1024."""
TURN_BYTES = 4 << 20
"""What one connection moves before others have their turn."""
TLS_RECORD_BYTES = 16 * 1024
MAX_WAITING_MESSAGES = 16_384
"""A peer that lets more messages wait for it reads nothing."""
UNSENT_BYTES = 1 << 20
"""What the kernel keeps unsent, so that a message does not wait behind megabytes of blocks."""

_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """Reads and writes when the socket is ready. An error closes it, and is told to the peer if the socket takes it at once."""

    def __init__(self, connection: socket.socket) -> None:
        self.is_closed = False
        self.has_heard = True
        """Whether any byte has come since this was last set to False."""
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._buffer = bytearray(BUFFER_BYTES)
        self._start = self._end = 0
        self._sink: deque[memoryview] = deque()
        """Where the next bytes go, before those of the next message."""
        self._in_blocks = False
        self._messages: list[bytes] = []
        self._outgoing: deque[memoryview] = deque()
        self._body_bytes = 0
        """Of the blocks that are being sent. Their message comes before."""
        self._is_scheduled = self._is_watched = False
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._loop.add_reader(connection.fileno(), self._readable)

    @abstractmethod
    def received(self, message: KvMessage) -> Sequence[memoryview]:
        """Returns where the bytes behind this message go. May raise LinkError, which closes the connection."""

    def bytes_received(self) -> None:
        """Some bytes have come."""

    def blocks_received(self) -> None:
        """The bytes behind the last message are where they belong."""

    def next_blocks(self) -> tuple[bytes, Sequence[memoryview]] | None:
        """The message and the bytes of the next blocks to send."""
        return None

    def blocks_sent(self) -> None:
        """The memory of the last blocks is not read any more."""

    @abstractmethod
    def lost(self, error: LinkError) -> None:
        """Called once, when the connection has ended."""

    @property
    def has_unsent_messages(self) -> bool:
        return bool(self._messages)

    def is_host_gone(self) -> bool:
        return not self.is_closed and is_host_gone(self._socket)

    def send(self, message: KvMessage) -> None:
        """Messages go before blocks."""
        if self.is_closed:
            return
        self._messages.append(encode(message))
        if len(self._messages) > MAX_WAITING_MESSAGES:
            self.close(LinkBroken("the peer reads nothing"))
        self.wake()

    def wake(self) -> None:
        """There is something to send."""
        if not self._is_scheduled and not self._is_watched and not self.is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._writable)

    def discard(self) -> None:
        """The rest of the blocks that are coming is not wanted: nothing is written into their slots from now on."""
        rest = sum(map(len, self._sink))
        self._sink = deque(repeated(memoryview(bytearray(min(rest, BUFFER_BYTES))), rest))

    def blank(self) -> None:
        """The memory of the blocks that are being sent must not be read any more: zeros take the place of the rest."""
        rest = sum(map(len, self._outgoing))
        message = list(islice(self._outgoing, 1 if rest > self._body_bytes else 0))
        self._outgoing = deque([*message, *repeated(memoryview(bytes(BUFFER_BYTES)), min(rest, self._body_bytes))])

    def close(self, error: LinkError) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        with contextlib.suppress(OSError):
            if not self._outgoing and not isinstance(error, LinkBroken):
                self._socket.send(encode(Goodbye(error.code, str(error))))
        self._socket.close()
        self._sink.clear()
        self._outgoing.clear()
        self.lost(error)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except LinkError as error:
            self.close(error)
        except OSError as error:
            self.close(LinkBroken(f"the connection broke: {reason_of(error)}"))
        except BaseException:
            self.close(LinkError("an error in this worker"))
            raise

    # Reading.

    def _readable(self) -> None:
        taken = 0
        with self._errors(), contextlib.suppress(*_BLOCKED):
            while not self.is_closed and taken < TURN_BYTES:
                taken += self._read()
            if self._is_tls and not self.is_closed:
                # What OpenSSL has already read does not make the socket readable.
                self._loop.call_soon(self._readable)

    def _read(self) -> int:
        views = list(islice(self._sink, MAX_VIEWS))
        if len(views) == len(self._sink):
            views.append(memoryview(self._buffer)[self._end :])
        count = self._socket.recv_into(views[0]) if self._is_tls else self._socket.recvmsg_into(views)[0]
        del views
        if not count:
            raise LinkBroken("the peer closed the connection")
        self.has_heard = True
        self.bytes_received()
        self._end += self._fill(count)
        if self._in_blocks and not self._sink:
            self._finish_blocks()
        self._parse()
        return count

    def _fill(self, count: int) -> int:
        """Counts these bytes into the sink. Returns how many came behind it."""
        sink = self._sink
        while sink and count:
            view = sink.popleft()
            if len(view) > count:
                sink.appendleft(view[count:])
                return 0
            count -= len(view)
        return count

    def _parse(self) -> None:
        while not self._in_blocks and not self.is_closed and self._end - self._start >= LENGTH.size:
            with memoryview(self._buffer) as view:
                length = LENGTH.size + length_of(view[self._start :], MAX_MESSAGE_BYTES)
                if length > self._end - self._start:
                    break
                with view[self._start + LENGTH.size : self._start + length] as body:
                    message = decode(body)
            self._start += length
            if isinstance(message, Goodbye):
                raise PeerLeft(f"the peer closed the connection: {message.code}: {message.message}")
            self._begin_blocks(self.received(message))
        if not self.is_closed:
            self._make_room()

    def _begin_blocks(self, views: Sequence[memoryview]) -> None:
        """Some of their bytes may have come already, behind the message."""
        if not views or self.is_closed:
            return
        self._in_blocks, sink = True, self._sink
        sink.extend(views)
        while sink and self._start < self._end:
            count = min(len(sink[0]), self._end - self._start)
            sink[0][:count] = memoryview(self._buffer)[self._start : self._start + count]
            self._start += count
            self._fill(count)
        if not sink:
            self._finish_blocks()

    def _finish_blocks(self) -> None:
        self._in_blocks = False
        self.blocks_received()

    def _make_room(self) -> None:
        """Moves the beginning of a message to the front. A long one, whose length was checked, gets a longer buffer until it is read."""
        waiting = self._end - self._start
        needed = BUFFER_BYTES
        if waiting >= LENGTH.size and not self._in_blocks:
            needed = max(needed, LENGTH.size + int(LENGTH.unpack_from(self._buffer, self._start)[0]))
        if self._start or needed > len(self._buffer):
            moved = self._buffer[self._start : self._end]
            if needed != len(self._buffer):
                self._buffer = bytearray(needed)
            self._buffer[:waiting] = moved
            self._start, self._end = 0, waiting

    # Writing.

    def _writable(self) -> None:
        self._is_scheduled = False
        budget = TURN_BYTES
        with self._errors():
            try:
                while budget > 0 and not self.is_closed:
                    if not self._outgoing:
                        # Each refill costs something: blocks in shared memory are a short message, but all of them are checked.
                        budget -= TURN_BYTES // 4
                        if not self._refill():
                            self._watch(False)
                            return
                    budget -= self._write()
                self.wake()
            except _BLOCKED:
                self._watch(True)

    def _refill(self) -> bool:
        if self._messages:
            self._body_bytes = 0
            self._outgoing.append(memoryview(b"".join(self._messages)))
            self._messages.clear()
            return True
        blocks = self.next_blocks()
        if blocks is None:
            return bool(self._messages) and self._refill()
        message, views = blocks
        self._outgoing.append(memoryview(message))
        self._outgoing.extend(views)
        self._body_bytes = sum(map(len, views))
        return True

    def _write(self) -> int:
        outgoing = self._outgoing
        if self._is_tls:
            # A write that has to be repeated must be as long as before.
            sent = count = self._socket.send(outgoing[0][:TLS_RECORD_BYTES])
        else:
            sent = count = self._socket.sendmsg(list(islice(outgoing, MAX_VIEWS)))
        while count:
            view = outgoing.popleft()
            if len(view) > count:
                outgoing.appendleft(view[count:])
                return sent
            count -= len(view)
        if not outgoing and self._body_bytes:
            self._body_bytes = 0
            self.blocks_sent()
        return sent

    def _watch(self, wanted: bool) -> None:
        if wanted != self._is_watched and not self.is_closed:
            self._is_watched = wanted
            number = self._socket.fileno()
            if wanted:
                self._loop.add_writer(number, self._writable)
            else:
                self._loop.remove_writer(number)


def repeated(view: memoryview, size: int) -> Iterator[memoryview]:
    """The same memory again and again, `size` bytes in all."""
    while size > 0:
        yield view[:size]
        size -= len(view)


def check_message(message: KvMessage, expected: str) -> LinkError:
    """The error for a message that is not allowed here."""
    return FrameMalformed(f"expected {expected}, got {type(message).__name__}")
