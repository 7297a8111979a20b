"""The process that decodes pictures: `python -m penstock.media.child`.

If a file makes a decoder crash, run for ever or take all memory, this process ends, and nothing else.

It has no secrets: its environment is empty, and it gets one picture at a time.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import sys
import warnings
import zlib
from binascii import Error as Base64Error

import msgspec

from penstock.media.decode import decode
from penstock.media.file import decode_base64
from penstock.media.job import Done, Job, Refused
from penstock.wire.errors import RequestError

NICENESS = 5
"""Streams come before pictures where cores are few."""

# What decoders raise for broken files. Others end the process, which is also an answer.
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, EOFError, struct.error, zlib.error)


def answer(job: Job, shared: int) -> Done | Refused:
    try:
        data = _read(shared, job.length)
        decoded = decode(decode_base64(data) if job.is_base64 else data, job.kind, job.most_pixels, job.is_low, job.rules)
    except ModuleNotFoundError as error:
        return Refused("missing", f"the server lacks the package {error.name!r}: pip install 'penstock[model]'")
    except RequestError as error:
        return Refused("broken", error.message)
    except Base64Error as error:
        return Refused("broken", f"it is not base64: {error}")
    except _BROKEN as error:
        return Refused("broken", f"it is a broken {job.kind}: {str(error) or type(error).__name__}"[:200])
    except (MemoryError, RuntimeError) as error:
        return Refused("broken", f"it cannot be decoded: {str(error) or 'it needs too much memory'}"[:200])
    os.ftruncate(shared, 0)
    _write(shared, decoded.pixels)
    return Done(decoded.size, decoded.content, decoded.seal, len(decoded.pixels))


def _read(shared: int, length: int) -> bytes:
    parts: list[bytes] = []
    place = 0
    while place < length and (part := os.pread(shared, length - place, place)):
        parts.append(part)
        place += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write(shared: int, pixels: bytes) -> None:
    view, place = memoryview(pixels), 0
    while place < len(view):
        place += os.pwrite(shared, view[place:], place)


def main() -> None:
    shared, memory = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    # Ctrl-C is for the front end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    # Else the first picture pays for it.
    with contextlib.suppress(ModuleNotFoundError):
        import PIL.GifImagePlugin
        import PIL.JpegImagePlugin
        import PIL.PngImagePlugin
        import PIL.WebPImagePlugin  # noqa: F401
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        # Its signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, job.cpu_seconds)
        found = answer(job, shared)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
