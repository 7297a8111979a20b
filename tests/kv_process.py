"""A worker's process that others pull from: `python kv_process.py ADDRESS BLOCKS EXPORTED`. It exports only the first blocks."""

from __future__ import annotations

import sys
import threading

from kv_engine import DictEngine, names_of
from kv_peers import SECRET
from penstock.cluster.kv.handshake import Credentials
from penstock.cluster.kv.transport import SocketTransport
from penstock.wire.address import parse_address


def main() -> None:
    address, blocks, exported = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = DictEngine(is_manual=True)
    slots = engine.store(names_of(blocks))
    transport = SocketTransport(engine, Credentials("process", SECRET), parse_address(address))
    engine.connect(transport)
    print(transport.start(), flush=True)
    engine.until(lambda: engine.exports, 60)
    transport.exported(next(iter(engine.exports)), 0, slots[:exported], is_last=False)
    threading.Event().wait()


if __name__ == "__main__":
    main()
