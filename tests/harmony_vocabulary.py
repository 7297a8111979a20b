"""Makes the vocabulary that `openai-harmony` would download, out of the npm package `js-tiktoken`.

`npm pack js-tiktoken && tar xzf js-tiktoken-*.tgz && python tests/harmony_vocabulary.py package/dist/ranks/o200k_base.js FOLDER`; then run
the tests with TIKTOKEN_ENCODINGS_BASE=FOLDER.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from pathlib import Path

NAME = "o200k_base.tiktoken"
DIGEST = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"

_RANKS = re.compile(r'bpe_ranks"?: ?"((?:[^"\\]|\\.)*)"')


def vocabulary(source: str) -> bytes:
    """The lines of the file, from the package's ranks: `! first token token …` for each run of them."""
    ranks = _RANKS.search(source)
    if ranks is None:
        raise ValueError("there are no ranks in this file")
    tokens: dict[int, str] = {}
    for line in ranks[1].replace("\\n", "\n").splitlines():
        _, first, *run = line.split(" ")
        tokens |= dict(enumerate(run, int(first)))
    for token in tokens.values():
        base64.b64decode(token, validate=True)
    return "".join(f"{token} {rank}\n" for rank, token in sorted(tokens.items())).encode()


def main(ranks: Path, folder: Path) -> None:
    made = vocabulary(ranks.read_text())
    if hashlib.sha256(made).hexdigest() != DIGEST:
        raise SystemExit(f"{ranks} does not hold the vocabulary that is expected")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_bytes(made)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
