"""Pairs of engines on a machine with few cores and no GPU, for tests only. What is changed here is said wherever a result rests on it.

NIXL's thread for progress polls without a pause: it gets a low priority and any core. SGLang registers its KV memory with NIXL as that of
a GPU: here it is the machine's own.
"""

import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

NICENESS = 12
THREADS = Path("/proc/self/task")
TAKE_MEMORY = ("register_memory", "deregister_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist")


def _quieten(agent: Any) -> None:
    make = agent.__init__

    def quietly(self: object, *arguments: object, **options: object) -> None:
        before = set(THREADS.iterdir())
        make(self, *arguments, **options)
        for thread in [int(entry.name) for entry in set(THREADS.iterdir()) - before]:
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
            os.sched_setaffinity(thread, range(os.cpu_count() or 1))

    agent.__init__ = quietly


def _here(value: object) -> object:
    return "DRAM" if isinstance(value, str) and value == "VRAM" else value


def _on_this_machine(method: Callable[..., object]) -> Callable[..., object]:
    def called(self: object, *arguments: object, **options: object) -> object:
        return method(self, *map(_here, arguments), **{name: _here(value) for name, value in options.items()})

    return called


def _change(module: ModuleType) -> None:
    _quieten(module.nixl_agent)
    for name in TAKE_MEMORY:
        if hasattr(module.nixl_agent, name):
            setattr(module.nixl_agent, name, _on_this_machine(getattr(module.nixl_agent, name)))


class _AfterImport(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: object = None) -> ModuleSpec | None:
        if name != "nixl_cu12._api":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            _change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterImport())
