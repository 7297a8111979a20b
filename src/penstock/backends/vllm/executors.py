"""vLLM's executors, by another name, for what comes with it: an engine core that ends with the worker that it works for.

By itself it does not notice when the process that started it is killed: it would sit on the GPU's memory for ever. Its executor is the
first thing of ours that it gets, by the name of this module. So it imports this before it does anything else, and that is when it begins
to watch, for half a minute passes until an executor is made.
"""

from __future__ import annotations

import os

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from penstock.backends.external.child_processes import end_with

WORKER_VARIABLE = "PENSTOCK_WORKER_PROCESS"
"""The process to end with, as those that it starts find it in their environment."""


class OneProcess(UniProcExecutor):  # type: ignore[misc]
    """The model is in the engine core's own process."""


class ManyProcesses(MultiprocExecutor):  # type: ignore[misc]
    """The model is in processes of the engine core's, which end when it does; that is vLLM's own doing."""


def ending_with_worker(executor: type) -> type:
    """The executor that vLLM has chosen, made to end with us; others than the two above are as they were."""
    return {UniProcExecutor: OneProcess, MultiprocExecutor: ManyProcesses}.get(executor, executor)


def _end_with_worker() -> None:
    worker = os.environ.get(WORKER_VARIABLE)
    if worker is not None and int(worker) != os.getpid():
        end_with(int(worker))


_end_with_worker()
