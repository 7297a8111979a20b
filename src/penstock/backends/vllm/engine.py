"""vLLM in the worker: its AsyncLLM, tokens in and tokens out. Its engine core is a process of its own, which vLLM starts and talks to."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from penstock.backends.external.child_processes import ChildWatch
from penstock.backends.external.engine import Chunk, EngineDied, EngineFacts, EngineRefused, EngineRequest
from penstock.backends.external.errors import first_error, forget_directory, write_logging_config
from penstock.backends.vllm.arguments import check_version, event_endpoints, installed_version, one_line, plan_engine
from penstock.backends.vllm.requests import check_end, chunk_of, sampling_arguments
from penstock.config.engines import EngineSettings
from penstock.wire.errors import ConfigError, PenstockError
from penstock.wire.messages import Capability, Fault

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# How long the engine core may take to end by itself, before it is made to.
END_SECONDS = 3.0
# While a load that was given up is under way, processes that it starts are ended so often.
ABANDON_SECONDS = 0.1
CORE = "EngineCore"
_LOG_CONFIG = "VLLM_LOGGING_CONFIG_PATH"
_LOGGER = "vllm"
WITHOUT_GRAMMAR: tuple[Capability, ...] = ("logprobs", "prompt_logprobs")
ALL: tuple[Capability, ...] = (*WITHOUT_GRAMMAR, "grammar")


class VllmEngine:
    """See `external.engine.ExternalEngine`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._has_grammar = False
        self._directory: Path | None = None
        self._llm: Any = None
        self._watch: ChildWatch | None = None
        self._death: str | None = None
        self._is_closing = False

    async def start(self, on_death: Callable[[str], None]) -> EngineFacts:
        if not self._settings.any_version or installed_version() is None:
            check_version(installed_version())
        self._on_death = on_death
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-vllm-"))
        try:
            return await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> EngineFacts:
        # In a thread: it takes a minute, and until then the worker must be able to end. What of vLLM belongs to a loop, it takes when
        # it first needs one.
        loading = asyncio.create_task(asyncio.to_thread(self._load))
        try:
            self._llm = await asyncio.shield(loading)
        except asyncio.CancelledError:
            await self._abandon(loading)
            raise
        self._watch = ChildWatch([(process.pid, "vLLM's engine core") for process in _processes(self._llm)], self._end)
        if "generate" not in await self._answer(self._llm.get_supported_tasks()):
            raise ConfigError(f"--model {self._settings.model}: vLLM does not generate text with it")
        self._find_grammar()
        self._find_options()
        return self._facts()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        self._check(request)
        llm, top = self._llm, request.logprobs
        is_over = False
        try:
            outputs = llm.generate(self._prompt(request), self._sampling(request), request.id, **self._options(request))
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    is_over = output.finished
                    chunk = chunk_of(output, top)
                    if chunk.token_ids or chunk.finish is not None:
                        yield chunk
                    if is_over:
                        check_end(output)
        except PenstockError:
            raise
        except Exception as error:
            # vLLM has aborted what it could not go on with.
            is_over = True
            raise self._translated(error) from error
        finally:
            if not is_over:
                # vLLM does that itself, but for a request that it was just handing over.
                await llm.abort(request.id)

    async def ping(self) -> None:
        await self._answer(self._llm.is_sleeping())

    async def close_session(self, session_id: str) -> None:
        """vLLM keeps nothing for a session alone."""

    async def close(self) -> None:
        self._is_closing = True
        if self._watch is not None:
            self._watch.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            await _shut_down(llm)
        if self._directory is not None:
            if os.environ.get(_LOG_CONFIG, "").startswith(f"{self._directory}/"):
                del os.environ[_LOG_CONFIG]
            forget_directory(self._directory, _LOGGER)
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _check(self, request: EngineRequest) -> None:
        """Raises for what vLLM cannot do at all."""
        if self._death is not None:
            raise EngineDied(self._death)
        if request.bootstrap is not None:
            # Its connectors want an engine's own id and the blocks there, which nobody knows before the prefill.
            raise EngineRefused(Fault("unsupported", "vLLM takes no prefill from another worker by its host, port and room"))
        if request.lark is not None and not self._has_grammar:
            raise EngineRefused(Fault("unsupported", "vLLM has no grammar here: it runs without a tokenizer that llguidance can take"))

    def _prompt(self, request: EngineRequest) -> Any:
        from vllm.inputs import TokensPrompt, tokens_input

        if request.lark is not None:
            # What is not yet in the engine's own form, vLLM looks at in a thread: checking a grammar takes its time.
            return TokensPrompt(prompt_token_ids=list(request.token_ids))
        return tokens_input(list(request.token_ids))

    def _sampling(self, request: EngineRequest) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        return SamplingParams(
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
            flat_logprobs=True,
            # They are this request's alone.
            skip_clone=True,
            structured_outputs=None if request.lark is None else StructuredOutputsParams(grammar=request.lark),
            **sampling_arguments(request),
        )

    def _options(self, request: EngineRequest) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self._takes_sessions and request.session_id is not None:
            options["session_id"] = request.session_id
        if self._is_by_priority and request.priority:
            # The other way round: its lowest is the first.
            options["priority"] = -request.priority
        return options

    def _translated(self, error: Exception) -> PenstockError:
        from vllm.exceptions import GracefulHTTPError, VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if isinstance(error, EngineDeadError) or self._llm is None or self._llm.errored:
            return EngineDied(self._death or "vLLM's engine core has died")
        if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        if isinstance(error, VLLMClientError | ValueError):
            return EngineRefused(Fault("engine_refused", one_line(error)))
        if isinstance(error, GracefulHTTPError):
            return EngineRefused(Fault("overloaded", one_line(error), retryable=True))
        log.error("vLLM has failed a generation", exc_info=error)
        return EngineRefused(Fault("engine_error", f"vLLM: {type(error).__name__}: {one_line(error)}"))

    async def _answer(self, question: Awaitable[Answer]) -> Answer:
        """What the engine core answers; EngineDied when it cannot any more. vLLM itself would wait for ever."""
        from vllm.v1.engine.exceptions import EngineDeadError

        asked = asyncio.ensure_future(question)
        try:
            await asyncio.wait((asked, self._died), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        except EngineDeadError as error:
            raise EngineDied(self._death or str(error)) from error
        finally:
            asked.cancel()
        raise EngineDied(self._death or "vLLM's engine core has died")

    def _end(self, reason: str) -> None:
        self._death = reason
        self._died.set_result(None)
        if not self._is_closing:
            self._on_death(reason)

    def _load(self) -> Any:
        """In a thread. Raises ConfigError."""
        assert self._directory is not None
        _set_environment(self._directory)
        try:
            plan = plan_engine(self._settings, self._directory)
            for warning in plan.warnings:
                log.warning("%s", warning)
            return _make_engine(plan.arguments)
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"--engine vllm: vLLM cannot be imported: {one_line(error)}") from error
        except Exception as error:
            reason = first_error(self._directory) or f"{type(error).__name__}: {one_line(error)}"
            raise ConfigError(f"vLLM cannot run --model {self._settings.model}: {reason}") from error

    async def _abandon(self, loading: asyncio.Task[Any]) -> None:
        """Nobody waits any more for what is being loaded: without its engine core, it ends soon."""
        while not loading.done():
            for child in multiprocessing.active_children():
                if child.name.startswith(CORE):
                    child.kill()
            await asyncio.wait((loading,), timeout=ABANDON_SECONDS)
        if not loading.cancelled() and loading.exception() is None:
            self._llm = loading.result()

    def _find_grammar(self) -> None:
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend

        tokenizer = self._llm.renderer.tokenizer
        # Before 0.32, vLLM does not ask, and fails with the first grammar.
        can_take = getattr(GuidanceBackend, "is_tokenizer_supported", _is_fast)
        self._has_grammar = tokenizer is not None and can_take(tokenizer)
        if not self._has_grammar:
            why = "runs without its tokenizer" if tokenizer is None else "has a tokenizer that llguidance cannot take"
            log.warning("vLLM %s: there is no structured output, and no call of a tool can be forced", why)

    def _find_options(self) -> None:
        self._takes_sessions = "session_id" in inspect.signature(self._llm.generate).parameters
        self._is_by_priority = self._llm.vllm_config.scheduler_config.policy == "priority"

    def _facts(self) -> EngineFacts:
        config = self._llm.vllm_config
        cache, ranks = config.cache_config, config.parallel_config.data_parallel_size
        return EngineFacts(
            context_length=config.model_config.max_model_len,
            block_size=cache.block_size,
            kv_blocks=cache.num_gpu_blocks or 0,
            max_batch=config.scheduler_config.max_num_seqs * ranks,
            events=event_endpoints(config.kv_events_config) if cache.enable_prefix_caching and ranks == 1 else None,
            capabilities=ALL if self._has_grammar else WITHOUT_GRAMMAR,
        )


def _is_fast(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "is_fast", False))


def _set_environment(directory: Path) -> None:
    """What vLLM and its processes read when they are imported, before they are."""
    # A fork would inherit our sockets, and keep our peers from noticing that we have ended.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # So long its core waits for helpers that do not end by themselves, which they do not, before it tells them to.
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if os.environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0" and _LOG_CONFIG not in os.environ:
        os.environ[_LOG_CONFIG] = str(write_logging_config(directory, _LOGGER, level.upper(), failures=_LOGGER))


def _make_engine(arguments: Any) -> Any:
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    from penstock.backends.vllm.executors import WORKER_VARIABLE, ending_with_worker

    # That of its own server, whose defaults for batches are those of a server.
    context = UsageContext.OPENAI_API_SERVER
    config = arguments.create_engine_config(context)
    if config.kv_events_config is not None and not config.cache_config.enable_prefix_caching:
        log.warning("vLLM caches no prefixes with this model: the router learns nothing of what is cached")
        config.kv_events_config = None
    os.environ[WORKER_VARIABLE] = str(os.getpid())
    return AsyncLLM(
        config,
        ending_with_worker(Executor.get_class(config)),
        log_stats=not arguments.disable_log_stats,
        usage_context=context,
        log_requests=arguments.enable_log_requests,
    )


def _processes(llm: Any) -> list[Any]:
    """Its engine cores, which are processes here unless Ray has them."""
    return list(getattr(llm.engine_core.resources.engine_manager, "processes", ()))


async def _shut_down(llm: Any) -> None:
    """Ends vLLM's processes and tasks, and awaits that."""
    resources = llm.engine_core.resources
    tasks = [task for task in (llm.output_handler, resources.output_queue_task, resources.stats_update_task) if task is not None]
    await asyncio.to_thread(llm.shutdown, END_SECONDS)
    for process in _processes(llm):
        await asyncio.to_thread(process.join)
    if tasks:
        await asyncio.wait(tasks, timeout=END_SECONDS)
    # It would be called again by the destructor, which may run when the interpreter has lost what it needs.
    llm.shutdown = lambda: None
