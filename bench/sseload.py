"""`sseload`, the C load client: built with gcc from ../shared/tools/sseload.c where that exists."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "shared" / "tools" / "sseload.c"


def build_client(folder: Path) -> str | None:
    """The client's path; None where it cannot be built."""
    if not SOURCE.exists() or shutil.which("gcc") is None:
        return None
    target = folder / "sseload"
    subprocess.run(["gcc", "-O2", "-o", str(target), str(SOURCE)], check=True)
    return str(target)


def figures_of(load: subprocess.Popen[str]) -> dict[str, Any]:
    """What a load that was started has measured, when it has ended."""
    output, _ = load.communicate()
    figures: dict[str, Any] = json.loads(output)
    return figures
