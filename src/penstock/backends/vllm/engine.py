"""vLLM in the worker: its AsyncLLM, tokens in and tokens out. vLLM runs its engine core in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import multiprocessing
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from penstock.backends.external.engine import (
    Chunk,
    EngineDied,
    EngineFacts,
    EngineRefused,
    EngineRequest,
    EventEndpoints,
    PromptImages,
)
from penstock.backends.external.handover import unpack_ticket
from penstock.backends.external.image_events import KeyedImages, image_uuid
from penstock.backends.external.images import Placeholder, pil_image
from penstock.backends.external.in_process import InProcessEngine, free_port, one_line
from penstock.backends.vllm.arguments import PACKAGE, event_endpoints, make_arguments
from penstock.backends.vllm.handover import (
    FOR_ANOTHER_ENGINE,
    HOST_VARIABLE,
    PORT_VARIABLE,
    connector_settings,
    lease_of,
    moves_of,
    transfer_parameters,
)
from penstock.backends.vllm.requests import check_end, check_expanded, chunk_of, sampling_arguments
from penstock.config.engines import EngineSettings
from penstock.wire.errors import ConfigError, PenstockError
from penstock.wire.messages import Capability, Fault

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# The engine core is killed if it has not ended by itself after this time.
END_SECONDS = 3.0
CORE = "EngineCore"
GIVEN_UP = "error"
WITHOUT_GRAMMAR: tuple[Capability, ...] = ("logprobs", "prompt_logprobs", "isolation")


class VllmEngine(InProcessEngine):
    """See `ExternalEngine`."""

    package = PACKAGE

    def __init__(self, settings: EngineSettings, placeholder: Placeholder | None = None) -> None:
        super().__init__(settings, placeholder)
        self._lease_seconds = 0.0
        self._pulls = Pulls()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        self._check(request)
        llm, top = self._engine, request.logprobs
        lease = None if request.export is None else self._lease_seconds
        transfer = self._transfer(request)
        is_over = False
        try:
            prompt = _prompt(request) if request.images is None else await asyncio.to_thread(_image_prompt, request, request.images)
            ask = partial(self._ask, prompt, request, transfer)
            async with contextlib.aclosing(_with_pictures(ask) if request.images and not request.source else ask()) as outputs:
                async for output in outputs:
                    is_over = output.finished
                    if request.images is not None and "multi_modal_data" in prompt:
                        check_expanded(output, request)
                        # vLLM has what it needs of them.
                        prompt.pop("multi_modal_data")["image"].clear()
                    chunk = chunk_of(output, top, lease)
                    if chunk.token_ids or chunk.finish is not None:
                        yield chunk
                    if is_over:
                        check_end(output)
        except PenstockError:
            raise
        except Exception as error:
            # vLLM aborts a request that fails.
            is_over = True
            raise self._translated(error) from error
        finally:
            if not is_over:
                # vLLM does this itself, except for a request that is just being handed over.
                await llm.abort(request.id)

    def pulled_bytes(self) -> int:
        return self._pulls.size

    async def ping(self) -> None:
        await self._answer(self._engine.is_sleeping())

    async def close_session(self, session_id: str) -> None:
        """vLLM keeps nothing for a session."""

    def _load(self, directory: Path) -> Any:
        self._set_environment(directory)
        with self._channel():
            return _make_engine(make_arguments(self._settings, directory), self._pulls)

    async def _establish(self) -> EngineFacts:
        self._watch_processes((process.pid for process in _processes(self._engine)), "vLLM's engine core")
        if "generate" not in await self._answer(self._engine.get_supported_tasks()):
            raise ConfigError(f"--model {self._settings.model}: vLLM cannot generate text with it")
        config = self._engine.vllm_config
        cache, ranks = config.cache_config, config.parallel_config.data_parallel_size
        self._has_grammar = _has_grammar(self._engine.renderer.tokenizer)
        self._takes_sessions = "session_id" in inspect.signature(self._engine.generate).parameters
        self._is_by_priority = config.scheduler_config.policy == "priority"
        moves = moves_of(config, self.package.version() or "")
        self._lease_seconds = 0.0 if moves is None else lease_of(config)
        return EngineFacts(
            context_length=config.model_config.max_model_len,
            block_size=cache.block_size,
            kv_blocks=cache.num_gpu_blocks or 0,
            max_batch=config.scheduler_config.max_num_seqs * ranks,
            events=self._events(config.kv_events_config) if cache.enable_prefix_caching and ranks == 1 else None,
            capabilities=(*WITHOUT_GRAMMAR, "grammar") if self._has_grammar else WITHOUT_GRAMMAR,
            moves=moves,
        )

    def _events(self, config: Any) -> EventEndpoints | None:
        endpoints = event_endpoints(config)
        if endpoints is None or self._placeholder is None:
            return endpoints
        return replace(endpoints, images=KeyedImages(self._placeholder.position))

    def _kill_processes(self) -> None:
        for child in multiprocessing.active_children():
            if child.name.startswith(CORE):
                child.kill()

    async def _shut_down(self) -> None:
        llm = self._engine
        if llm is None:
            return
        resources = llm.engine_core.resources
        tasks = [task for task in (llm.output_handler, resources.output_queue_task, resources.stats_update_task) if task is not None]
        await asyncio.to_thread(llm.shutdown, END_SECONDS)
        for process in _processes(llm):
            await asyncio.to_thread(process.join)
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)
        # The destructor calls it again, perhaps when the interpreter is already half gone.
        llm.shutdown = lambda: None

    def _set_environment(self, directory: Path) -> None:
        """Sets what vLLM and its processes read on import."""
        # A forked process inherits our sockets, and our peers do not notice our end.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("DO_NOT_TRACK", "1")
        # The core waits this long for helper processes that never end by themselves, before it ends them.
        os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
        level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if os.environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0":
            self._set_up_logging(directory, level)

    @contextlib.contextmanager
    def _channel(self) -> Iterator[None]:
        """Where other engines ask this one how to read its KV. The core reads it when it starts."""
        chosen = {HOST_VARIABLE: self._settings.kv_host, PORT_VARIABLE: str(free_port(self._settings.kv_host))}
        ours = {} if connector_settings(self._settings) is None else {name: chosen[name] for name in chosen.keys() - os.environ.keys()}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                del os.environ[name]

    def _ask(self, prompt: Any, request: EngineRequest, transfer: dict[str, Any] | None) -> AsyncGenerator[Any, None]:
        """vLLM's outputs. It keeps the parameters, so they are made each time."""
        outputs: AsyncGenerator[Any, None] = self._engine.generate(
            prompt, _sampling(request, transfer), request.id, **self._options(request)
        )
        return outputs

    def _transfer(self, request: EngineRequest) -> dict[str, Any] | None:
        """vLLM's `kv_transfer_params` of a request whose KV goes to another engine, or comes from one."""
        if request.export is not None:
            return FOR_ANOTHER_ENGINE
        if request.source is None:
            return None
        body = unpack_ticket(request.source.ticket).body
        return transfer_parameters(body, len(request.token_ids), self._engine.vllm_config.cache_config.block_size)

    def _check(self, request: EngineRequest) -> None:
        """Raises for what vLLM cannot do at all."""
        self._check_alive()
        if request.lark is not None and not self._has_grammar:
            raise EngineRefused(Fault("unsupported", "vLLM has no grammar on this worker: llguidance cannot read its tokenizer"))

    def _options(self, request: EngineRequest) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self._takes_sessions and request.session_id is not None:
            options["session_id"] = request.session_id
        if self._is_by_priority and request.priority:
            # In vLLM the lowest number goes first.
            options["priority"] = -request.priority
        return options

    def _translated(self, error: Exception) -> PenstockError:
        from vllm.exceptions import GracefulHTTPError, VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if isinstance(error, EngineDeadError) or self._engine is None or self._engine.errored:
            return EngineDied(self._death or "vLLM's engine core has died")
        if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        if isinstance(error, VLLMClientError | ValueError):
            return EngineRefused(Fault("engine_refused", one_line(error)))
        if isinstance(error, GracefulHTTPError):
            return EngineRefused(Fault("overloaded", one_line(error), retryable=True))
        log.error("vLLM failed a generation", exc_info=error)
        return EngineRefused(Fault("engine_error", f"vLLM: {type(error).__name__}: {one_line(error)}"))

    async def _answer(self, question: Awaitable[Answer]) -> Answer:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await super()._answer(question)
        except EngineDeadError as error:
            raise EngineDied(self._death or str(error)) from error


def _prompt(request: EngineRequest) -> Any:
    from vllm.inputs import TokensPrompt, tokens_input

    if request.lark is not None:
        # vLLM processes this kind of prompt in a thread, which keeps the check of the grammar off the event loop.
        prompt = TokensPrompt(prompt_token_ids=list(request.token_ids))
        return prompt if request.salt is None else {**prompt, "cache_salt": request.salt}
    return tokens_input(list(request.token_ids), cache_salt=request.salt)


def _image_prompt(request: EngineRequest, images: PromptImages) -> Any:
    """Pictures are converted here, in a thread, and prepared by vLLM in one of its own. A known uuid brings back vLLM's features of that
    image, whatever the picture, so it is the name of the content."""
    from vllm.inputs import TokensPrompt

    pictures = [pil_image(picture) for picture in images.pictures]
    uuids = [image_uuid(picture.name) for picture in images.pictures]
    prompt = TokensPrompt(prompt_token_ids=list(images.token_ids), multi_modal_data={"image": pictures}, multi_modal_uuids={"image": uuids})
    return prompt if request.salt is None else {**prompt, "cache_salt": request.salt}


async def _with_pictures(ask: Callable[[], AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
    """vLLM sends its core only the pictures that the core does not have. After a request that left on its way there it is wrong about that.
    It gives up the next one with such a picture, and then knows better: so that one is asked once more."""
    async with contextlib.aclosing(ask()) as outputs:
        first = await anext(outputs, None)
        if first is not None and not (first.finished and first.outputs[0].finish_reason == GIVEN_UP):
            yield first
            async for output in outputs:
                yield output
            return
    async with contextlib.aclosing(ask()) as outputs:
        async for output in outputs:
            yield output


def _sampling(request: EngineRequest, transfer: dict[str, Any] | None) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    return SamplingParams(
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
        flat_logprobs=True,
        # No other request uses these parameters.
        skip_clone=True,
        structured_outputs=None if request.lark is None else StructuredOutputsParams(grammar=request.lark),
        extra_args=None if transfer is None else {"kv_transfer_params": dict(transfer)},
        **sampling_arguments(request),
    )


def _has_grammar(tokenizer: Any) -> bool:
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend

    # Before 0.32 vLLM does not check the tokenizer, and fails on the first grammar.
    can_take = getattr(GuidanceBackend, "is_tokenizer_supported", lambda tokenizer: bool(getattr(tokenizer, "is_fast", False)))
    if tokenizer is not None and can_take(tokenizer):
        return True
    why = "runs without its tokenizer" if tokenizer is None else "has a tokenizer that llguidance cannot read"
    log.warning("vLLM %s: structured output and forced tool calls are off", why)
    return False


class Pulls:
    """The KV that vLLM has pulled from other engines, by its connector's own count. An engine's object is also the factory that vLLM calls
    for a logger of statistics."""

    def __init__(self) -> None:
        self.size = 0

    def __call__(self, *_: Any) -> Pulls:
        return self

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        counted = None if scheduler_stats is None else scheduler_stats.kv_connector_stats
        if counted:
            # A connector of several connectors has one part per connector.
            for part in (counted, *(part for part in counted.values() if isinstance(part, dict))):
                self.size += sum(part.get("bytes_transferred", ()))

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, *_: Any) -> None:
        """Of no interest."""


def _make_engine(arguments: Any, pulls: Pulls) -> Any:
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    from penstock.backends.vllm.executors import WORKER_VARIABLE, ending_with_worker

    # vLLM chooses a server's defaults for batches by this context.
    context = UsageContext.OPENAI_API_SERVER
    config = arguments.create_engine_config(context)
    if config.kv_events_config is not None and not config.cache_config.enable_prefix_caching:
        log.warning("vLLM caches no prefixes with this model: the router does not know what is cached")
        config.kv_events_config = None
    os.environ[WORKER_VARIABLE] = str(os.getpid())
    return AsyncLLM(
        config,
        ending_with_worker(Executor.get_class(config)),
        log_stats=not arguments.disable_log_stats,
        usage_context=context,
        log_requests=arguments.enable_log_requests,
        stat_loggers=None if config.kv_transfer_config is None else [pulls],
    )


def _processes(llm: Any) -> list[Any]:
    """The engine cores. None with Ray: there they are no child processes."""
    return list(getattr(llm.engine_core.resources.engine_manager, "processes", ()))
