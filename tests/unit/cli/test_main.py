"""The `penstock` command itself."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "penstock", "config"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
