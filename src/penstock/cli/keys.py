"""`penstock key`: makes, lists and removes the keys of a key file."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.api.auth.keys import KEY_PREFIX, MOST_LIMIT, Key, check_name, key_digest, parse_keys, read_key_file
from penstock.config.front_end import QuotaLimits
from penstock.wire.errors import ConfigError

KEY_BYTES = 32
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency")
_HEADER = "# API keys of a Penstock server. Of each there is only the SHA-256 hash. A running server reads changes within a second.\n"
_TABLE = re.compile(r"\s*\[\[\s*keys\s*\]\]")
_COMMENT = re.compile(r"\s*(?:#.*)?\Z", re.DOTALL)


def add_key_parser(commands: Any) -> None:
    parser = commands.add_parser("key", help="API keys for `serve --key-file`: make, list, remove")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new", help="make a key, print it once, and add its hash to the file", epilog="The key is the only line on standard output."
    )
    new.add_argument("name", metavar="NAME", help="who it is for, as logs and metrics will say")
    new.add_argument("--requests-per-minute", type=int, metavar="N", help="most requests (default: what the server says)")
    new.add_argument("--tokens-per-minute", type=int, metavar="N", help="most tokens, of prompts and answers together (default: the same)")
    new.add_argument("--concurrency", type=int, metavar="N", help="most generations at once (default: the same)")
    listing = actions.add_parser("list", help="names and limits of the file's keys")
    remove = actions.add_parser("remove", help="take a key out of the file: it is refused within a second")
    remove.add_argument("name", metavar="NAME")
    for action in (new, listing, remove):
        action.add_argument("--file", type=Path, required=True, metavar="PATH", help="the key file")


def run_key(arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "new":
            print(new_key(arguments.file, arguments.name, _limits(arguments)))
            print(f"key {arguments.name!r} was added to {arguments.file}; it is shown this once", file=sys.stderr)
        case "remove":
            remove_key(arguments.file, arguments.name)
            print(f"key {arguments.name!r} was removed from {arguments.file}", file=sys.stderr)
        case _:
            print(_table(read_key_file(arguments.file)))
    return 0


def new_key(path: Path, name: str, limits: QuotaLimits) -> str:
    """A new random key, whose hash is in the file now. Raises ConfigError when the name is taken or the file is wrong."""
    check_name(name)
    with _locked(path):
        keys = read_key_file(path) if path.exists() else ()
        text = path.read_text(encoding="utf-8") if path.exists() else _HEADER
        if any(key.name == name for key in keys):
            raise ConfigError(f"key file {path}: there is a key {name!r} already")
        secret = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
        key = Key(name, key_digest(secret.encode()), limits)
        _write(path, text.rstrip("\n") + "\n" + _entry(key), (*keys, key))
    return secret


def remove_key(path: Path, name: str) -> None:
    """Takes a key out of the file; the rest of it stays as it is. Raises ConfigError when there is no such key."""
    with _locked(path):
        keys = read_key_file(path)
        index = next((index for index, key in enumerate(keys) if key.name == name), None)
        if index is None:
            raise ConfigError(f"key file {path}: there is no key {name!r}")
        text = _without_table(path.read_text(encoding="utf-8"), index)
        _write(path, text, (*keys[:index], *keys[index + 1 :]))


def _limits(arguments: argparse.Namespace) -> QuotaLimits:
    for name in LIMITS:
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= MOST_LIMIT:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: expected 1 to {MOST_LIMIT:,}")
    return QuotaLimits(*(getattr(arguments, name) for name in LIMITS))


def _entry(key: Key) -> str:
    lines = ["", "[[keys]]", f'name = "{key.name}"', f'sha256 = "{key.digest.hex()}"']
    lines += [f"{name} = {value}" for name in LIMITS if (value := getattr(key.limits, name)) is not None]
    return "\n".join(lines) + "\n"


def _without_table(text: str, index: int) -> str:
    """Without the lines of one table. Comments after its values are not its own."""
    lines = text.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if _TABLE.match(line)]
    if index >= len(starts):
        return text
    start, end = starts[index], [*starts, len(lines)][index + 1]
    while _COMMENT.match(lines[end - 1]):
        end -= 1
    if start and not lines[start - 1].strip():
        start -= 1
    return "".join(lines[:start] + lines[end:])


def _table(keys: Sequence[Key]) -> str:
    rows: list[tuple[str, ...]] = [("name", *LIMITS)]
    rows += [(key.name, *("-" if (value := getattr(key.limits, name)) is None else f"{value}" for name in LIMITS)) for key in keys]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone with the file, among commands like this. Raises ConfigError when its folder cannot be used."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, text: str, expected: Sequence[Key]) -> None:
    """Replaces the file in one step, and only when the new text says what is expected. A new file is for its owner alone."""
    try:
        found: Sequence[Key] | None = parse_keys(text)
    except ConfigError:
        found = None
    if found != expected:
        raise ConfigError(f"key file {path}: is written in a way that this command cannot change; change it by hand")
    try:
        _replace(path.resolve(), text.encode())
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from error


def _replace(path: Path, content: bytes) -> None:
    before = path.stat() if path.exists() else None
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123, it is open already
            file.write(content)
            if before is not None:
                with contextlib.suppress(PermissionError):  # whoever may not give it away keeps it
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
