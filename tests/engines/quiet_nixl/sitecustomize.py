"""For tests with vLLM on few cores: NIXL's thread for progress polls without a pause. Here it gets a low priority and any core."""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

NICENESS = 12
THREADS = Path("/proc/self/task")


def _quiet(module: ModuleType) -> None:
    make = module.nixl_agent.__init__

    def quietly(self: object, *arguments: object, **options: object) -> None:
        before = set(THREADS.iterdir())
        make(self, *arguments, **options)
        for thread in [int(entry.name) for entry in set(THREADS.iterdir()) - before]:
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
            os.sched_setaffinity(thread, range(os.cpu_count() or 1))

    module.nixl_agent.__init__ = quietly


class _AfterImport(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != "nixl._api":
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_quiet(module: ModuleType) -> None:
            execute(module)
            _quiet(module)

        spec.loader.exec_module = execute_and_quiet  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterImport())
