"""Looking up the hosts of sources. A name may hang for a minute and cannot be stopped, so nothing else waits behind it."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future

from penstock.wire.address import TcpAddress

Place = tuple[int, object]
"""A family of sockets, and where to connect."""


class Lookups:
    """Each name has a daemon thread of its own: neither other names nor the end of the process wait for it. All who ask for the same
    address meanwhile wait for the same lookup, so repeated attempts add no threads."""

    def __init__(self) -> None:
        self._pending: dict[TcpAddress, Future[list[Place]]] = {}

    async def places(self, address: TcpAddress) -> list[Place]:
        """Raises OSError or ValueError."""
        try:
            return _places(address, socket.AI_NUMERICHOST)
        except socket.gaierror:
            pass  # A name.
        found = self._pending.get(address)
        if found is None:
            found = self._pending[address] = Future()
            # Now who waits can be cancelled, and the lookup goes on.
            found.set_running_or_notify_cancel()
            try:
                threading.Thread(target=self._look_up, args=(address, found), name="host of a KV source", daemon=True).start()
            except RuntimeError as error:
                # The next attempt may find room for a thread.
                del self._pending[address]
                raise OSError(f"the host {address.host} cannot be looked up: {error}") from error
        return await asyncio.wrap_future(found)

    def _look_up(self, address: TcpAddress, found: Future[list[Place]]) -> None:
        try:
            places = _places(address)
        except Exception as error:  # noqa: BLE001, whatever it is: those that wait for this host are told
            del self._pending[address]
            found.set_exception(error if isinstance(error, (OSError, ValueError)) else OSError(repr(error)))
        else:
            del self._pending[address]
            found.set_result(places)


def _places(address: TcpAddress, flags: int = 0) -> list[Place]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, place) for family, _, _, _, place in found]
