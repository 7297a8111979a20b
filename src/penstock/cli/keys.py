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

from penstock.api.auth.keys import KEY_PREFIX, check_name, parse_keys, read_key_file
from penstock.config.front_end import MAX_WEIGHT, Key, QuotaLimits, key_digest
from penstock.config.setting import settings_of
from penstock.wire.errors import ConfigError

KEY_BYTES = 32
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency", "max_priority")
_HEADER = "# API keys of a Penstock server, as SHA-256 hashes. A running server reads changes within a second.\n"
_TABLE = re.compile(r"\s*\[\[\s*keys\s*\]\]")
_COMMENT = re.compile(r"\s*(?:#.*)?\Z", re.DOTALL)


def add_key_parser(commands: Any) -> None:
    parser = commands.add_parser("key", help="API keys for `serve --key-file`: make, list, remove")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new", help="make a key, print it once, and add its hash to the file", epilog="The key is the only line on standard output."
    )
    new.add_argument("name", metavar="NAME", help="name of the key's owner in logs and metrics")
    new.add_argument("--requests-per-minute", metavar="N", help="most requests per minute (default: the server's limit)")
    new.add_argument("--tokens-per-minute", metavar="N", help="most tokens per minute, prompts and answers (default: the server's limit)")
    new.add_argument("--concurrency", metavar="N", help="most generations at once (default: the server's limit)")
    new.add_argument("--max-priority", metavar="N", help="highest priority that requests may claim (default: the server's limit)")
    new.add_argument("--weight", metavar="N", default="1", help="its share where keys compete: 2 has twice the share of 1 (default: 1)")
    listing = actions.add_parser("list", help="list names and limits of the keys in the file")
    remove = actions.add_parser("remove", help="remove a key from the file; the server rejects it within a second")
    remove.add_argument("name", metavar="NAME")
    for action in (new, listing, remove):
        action.add_argument("--file", type=Path, required=True, metavar="PATH", help="the key file")


def run_key(arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "new":
            print(new_key(arguments.file, arguments.name, _limits(arguments), _weight(arguments.weight)))
            print(f"key {arguments.name!r} was added to {arguments.file}; it is not shown again", file=sys.stderr)
        case "remove":
            remove_key(arguments.file, arguments.name)
            print(f"key {arguments.name!r} was removed from {arguments.file}", file=sys.stderr)
        case _:
            print(_table(read_key_file(arguments.file)))
    return 0


def new_key(path: Path, name: str, limits: QuotaLimits, weight: int = 1) -> str:
    """Adds the hash of a new random key to the file and returns the key. Raises ConfigError when the name is taken or the file is wrong."""
    check_name(name)
    with _locked(path):
        keys = read_key_file(path) if path.exists() else ()
        text = path.read_text(encoding="utf-8") if path.exists() else _HEADER
        if any(key.name == name for key in keys):
            raise ConfigError(f"key file {path}: it already has a key {name!r}")
        secret = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
        key = Key(name, key_digest(secret.encode()), limits, weight)
        _write(path, text.rstrip("\n") + "\n" + _entry(key), (*keys, key))
    return secret


def remove_key(path: Path, name: str) -> None:
    """Removes a key from the file and leaves the rest as it is. Raises ConfigError when there is no such key."""
    with _locked(path):
        keys = read_key_file(path)
        index = next((index for index, key in enumerate(keys) if key.name == name), None)
        if index is None:
            raise ConfigError(f"key file {path}: it has no key {name!r}")
        text = _without_table(path.read_text(encoding="utf-8"), index)
        _write(path, text, (*keys[:index], *keys[index + 1 :]))


def _limits(arguments: argparse.Namespace) -> QuotaLimits:
    given = [(name, getattr(arguments, name), setting) for name, setting in zip(LIMITS, settings_of(QuotaLimits).values(), strict=True)]
    return QuotaLimits(*(None if text is None else setting.read(text, f"--{name.replace('_', '-')}") for name, text, setting in given))


def _weight(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_WEIGHT)) and 1 <= int(text) <= MAX_WEIGHT):
        raise ConfigError(f"--weight is {text[:80]!r}: expected a whole number from 1 to {MAX_WEIGHT:,}")
    return int(text)


def _entry(key: Key) -> str:
    lines = ["", "[[keys]]", f'name = "{key.name}"', f'sha256 = "{key.digest.hex()}"']
    lines += [f"{name} = {value}" for name in LIMITS if (value := getattr(key.limits, name)) is not None]
    lines += [f"weight = {key.weight}"] * (key.weight != 1)
    return "\n".join(lines) + "\n"


def _without_table(text: str, index: int) -> str:
    """The text without one table. Comments after the table's values stay."""
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
    rows: list[tuple[str, ...]] = [("name", *LIMITS, "weight")]
    for key in keys:
        limits = ["-" if (value := getattr(key.limits, name)) is None else f"{value}" for name in LIMITS]
        rows.append((key.name, *limits, f"{key.weight}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other `penstock key` commands away from the file. Raises ConfigError when its folder cannot be used."""
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
    """Replaces the file in one step, if the new text has the expected keys. Only the owner can read a new file."""
    try:
        found: Sequence[Key] | None = parse_keys(text)
    except ConfigError:
        found = None
    if found != expected:
        raise ConfigError(f"key file {path}: this command cannot edit a file with this layout; edit it by hand")
    try:
        _replace(path.resolve(), text.encode())
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from error


def _replace(path: Path, content: bytes) -> None:
    before = path.stat() if path.exists() else None
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123, a descriptor
            file.write(content)
            if before is not None:
                with contextlib.suppress(PermissionError):  # only root may give a file away
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
