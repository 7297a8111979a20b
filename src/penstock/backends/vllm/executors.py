"""vLLM's executors under names of this module, so that the engine core ends with its worker.

The engine core does not notice when the worker is killed: it would hold the GPU's memory for ever. It gets its executor by module and class
name, so it imports this module before anything else of ours. That import starts the watch; the executor itself is made half a minute later.
"""

from __future__ import annotations

import os

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from penstock.backends.external.in_process import end_with

WORKER_VARIABLE = "PENSTOCK_WORKER_PROCESS"
"""The environment variable with the worker's process id."""


class OneProcess(UniProcExecutor):  # type: ignore[misc]
    """The model runs in the engine core's own process."""


class ManyProcesses(MultiprocExecutor):  # type: ignore[misc]
    """The model runs in child processes of the engine core; vLLM itself ends them with the core."""


def ending_with_worker(executor: type) -> type:
    """Our subclass of the executor that vLLM chose. Other kinds of executor are returned unchanged."""
    return {UniProcExecutor: OneProcess, MultiprocExecutor: ManyProcesses}.get(executor, executor)


def _end_with_worker() -> None:
    worker = os.environ.get(WORKER_VARIABLE)
    if worker is not None and int(worker) != os.getpid():
        end_with(int(worker))


_end_with_worker()
