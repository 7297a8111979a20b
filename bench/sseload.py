"""Builds `sseload`, the load client in C, on first use, and reads its figures."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from programs import cache_folder

SOURCE = Path(__file__).with_name("sseload.c")


def build_client() -> str | None:
    """The path of the client; None without a C compiler. It is built once for all checkouts with the same source."""
    source = SOURCE.read_bytes()
    target = cache_folder() / f"sseload-{hashlib.sha256(source).hexdigest()[:16]}"
    if target.exists():
        return str(target)
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    # Under its name only when it is complete: another process may look for it meanwhile.
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    subprocess.run([compiler, "-O2", "-Wall", "-o", str(unfinished), str(SOURCE)], check=True)
    unfinished.rename(target)
    return str(target)


def figures_of(load: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for the end of a load; what it has measured."""
    output, _ = load.communicate()
    figures: dict[str, Any] = json.loads(output)
    return figures
