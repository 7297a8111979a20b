"""Where a front end gets tokenizers from: its own model files, its cache directory, or the worker."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from penstock.text.tokenizers.source import BUILT_IN, PackedTokenizer, fingerprint, pack_tokenizer
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import ConfigError
from penstock.wire.messages import MAX_TOKENIZER_BYTES

log = logging.getLogger(__name__)

Fetch = Callable[[], Awaitable[bytes]]

# The fingerprint names a file of the cache, and it comes from a worker.
_FINGERPRINT = re.compile("[0-9a-f]{64}")


def default_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """`penstock/tokenizers` in the user's cache directory."""
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or tempfile.gettempdir()) / ".cache"
    return Path(cache) / "penstock" / "tokenizers"


class TokenizerCache:
    """Finds tokenizers by fingerprint: in the files of `model`, then in `directory`, else with the caller's `fetch`.

    A fetched tokenizer is used and stored only if its hash is the fingerprint. Without a directory, or if it cannot be written, nothing is
    stored. A damaged file in the directory is fetched again.

    One tokenizer is read at a time, for that takes memory. When many workers bring the same one at once, it is read once; each of them
    fetches, so that a slow worker delays no other.
    """

    def __init__(self, directory: Path | None = None, model: Path | None = None) -> None:
        self._directory = directory
        self._model = model
        self._reading = asyncio.Lock()
        self.loaded: dict[str, Tokenizer] = {}

    async def load(self, wanted: str, fetch: Fetch | None = None) -> Tokenizer:
        """Raises ConfigError for a tokenizer that cannot be used, and what `fetch` raises. Reads and parses in a thread."""
        async with self._reading:
            if wanted not in self.loaded and (packed := await asyncio.to_thread(self.find, wanted)) is not None:
                self._keep(wanted, await asyncio.to_thread(packed.load))
        if wanted not in self.loaded:
            if fetch is None:
                raise ConfigError(f"the tokenizer {wanted} is not on this machine")
            data = await fetch()
            async with self._reading:
                if wanted not in self.loaded:
                    self._keep(wanted, await asyncio.to_thread(self._take, wanted, data))
        return self.loaded[wanted]

    def _keep(self, wanted: str, tokenizer: Tokenizer) -> None:
        self.loaded[wanted] = tokenizer
        for loss in tokenizer.template_losses:
            log.warning("the model's chat template %s; requests that need it are refused", loss)

    def _take(self, wanted: str, data: bytes) -> Tokenizer:
        """Checks, reads and stores what a worker sent."""
        found = fingerprint(data)
        if found != wanted:
            raise ConfigError(f"the worker sent a tokenizer with the fingerprint {found}: expected {wanted}")
        tokenizer = PackedTokenizer(wanted, data).load()
        self._store(wanted, data)
        return tokenizer

    def find(self, wanted: str) -> PackedTokenizer | None:
        """The tokenizer with this fingerprint, if it is on this machine. Raises ConfigError for an invalid fingerprint."""
        if wanted == BUILT_IN:
            return PackedTokenizer(BUILT_IN)
        if not _FINGERPRINT.fullmatch(wanted):
            raise ConfigError(f"the tokenizer is {wanted[:100]!r}: expected {BUILT_IN!r} or a fingerprint of 64 hexadecimal digits")
        return self._find_in_model(wanted) or self._find_stored(wanted)

    def _find_in_model(self, wanted: str) -> PackedTokenizer | None:
        if self._model is None:
            return None
        try:
            packed = pack_tokenizer(self._model)
        except ConfigError as error:
            log.warning("--tokenizer: %s; the tokenizer is taken from the cache or from the worker", error)
            return None
        return packed if packed.fingerprint == wanted else None

    def _find_stored(self, wanted: str) -> PackedTokenizer | None:
        if self._directory is None:
            return None
        path = self._directory / wanted
        try:
            if not path.is_file() or path.stat().st_size > MAX_TOKENIZER_BYTES:
                return None
            data = path.read_bytes()
        except OSError:
            return None
        return PackedTokenizer(wanted, data) if fingerprint(data) == wanted else None

    def _store(self, name: str, data: bytes) -> None:
        """Writes the file under another name first, so that no reader sees a part of it."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=self._directory) as temporary:
                written = Path(temporary) / name
                written.write_bytes(data)
                written.replace(self._directory / name)
        except OSError as error:
            log.warning("the tokenizer is kept in memory only: cannot write to %s: %s", self._directory, error.strerror)
