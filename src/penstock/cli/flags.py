"""The flags of every command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from penstock import __version__
from penstock.backends.http.settings import API_KEY_VARIABLE as ENGINE_KEY_VARIABLE
from penstock.backends.http.settings import Route
from penstock.cli.bench import add_bench_parser
from penstock.cli.doctor import add_doctor_parser
from penstock.cli.keys import add_key_parser
from penstock.cli.settings import (
    API_KEY_VARIABLE,
    ENGINES_OF_OTHERS,
    NO_STORE,
    SECRET_VARIABLE,
)
from penstock.config.engines import EmbeddedSettings, SimulatorConfig
from penstock.config.front_end import POLICIES, DispatchLimits, Limits, ResumeLimits, RouterSettings, StoreLimits
from penstock.text.formats.chosen import AUTO, NONE
from penstock.text.formats.tables import REASONING_FORMATS, TOOL_FORMATS

ENGINES = ("embedded", "simulator", *ENGINES_OF_OTHERS)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="An LLM serving stack. Tokens under pressure, none lost.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="the whole stack on this machine: workers and front end, supervised", formatter_class=_Formatter
    )
    serve.add_argument("--workers", type=int, default=1, metavar="N", help="worker processes to start")
    _add_front_end(serve)
    _add_engine(serve)
    worker = commands.add_parser("worker", help="one worker", formatter_class=_Formatter)
    worker.add_argument("--name", default="worker-0", help="its name in logs and metrics")
    worker.add_argument(
        "--listen", required=True, metavar="ADDRESS", help="unix:/path or tcp://host:port (TCP needs " + SECRET_VARIABLE + ")"
    )
    worker.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS", help="how long running generations may take to end after SIGTERM"
    )
    worker.add_argument("--store", metavar="URL", help="redis://…, where front ends that share it find this worker")
    worker.add_argument("--advertise", metavar="ADDRESS", help="the address that front ends reach it by (default: that of --listen)")
    _add_engine(worker)
    front_end = commands.add_parser("frontend", help="one front end", formatter_class=_Formatter)
    front_end.add_argument("--name", default="frontend", help="its name in the workers' logs")
    front_end.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a worker's address; repeat for each; others are found in --store",
    )
    _add_front_end(front_end)
    for command in (worker, front_end):
        command.add_argument(
            "--exit-with-parent", action="store_true", help="exit when standard input ends, as it does when the parent dies"
        )
    add_bench_parser(commands)
    add_key_parser(commands)
    add_doctor_parser(commands)
    return parser


def _add_front_end(parser: argparse.ArgumentParser) -> None:
    limits, resume, dispatch = Limits(), ResumeLimits(), DispatchLimits()
    group = parser.add_argument_group("front end")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    group.add_argument("--max-generations", type=int, default=limits.max_generations, metavar="N", help="generations at once; more get 429")
    group.add_argument(
        "--max-queued", type=int, default=dispatch.max_queued, metavar="N", help="generations that wait for room at a worker; more get 429"
    )
    group.add_argument("--max-body-bytes", type=int, default=limits.max_body_bytes, metavar="N", help="largest request body; more gets 413")
    group.add_argument(
        "--stall-timeout",
        type=float,
        default=limits.stall_seconds,
        metavar="SECONDS",
        help="cut off a reader that takes nothing for so long",
    )
    group.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS", help="how long running requests may take to end after SIGTERM"
    )
    group.add_argument(
        "--store",
        metavar="URL",
        help="redis://host:port/db: where several front ends keep sessions and find workers (default: in memory, for one front end)",
    )
    group.add_argument("--sessions-per-key", type=int, default=1024, metavar="N", help="sessions of one API key; more get no lease")
    group.add_argument(
        "--transcript-memory",
        type=float,
        default=256.0,
        metavar="MIB",
        help="memory for the tokens of sessions' earlier turns, which then need not be tokenized again",
    )
    group.add_argument(
        "--resume-grace",
        type=float,
        default=resume.grace,
        metavar="SECONDS",
        help="how long an answer that can be resumed goes on without its reader",
    )
    group.add_argument(
        "--resume-keep", type=float, default=resume.keep, metavar="SECONDS", help="how long it can be read again after its end"
    )
    group.add_argument(
        "--resume-memory", type=float, default=resume.memory / 2**20, metavar="MIB", help="memory for the events of such answers"
    )
    _add_responses(parser)
    _add_keys(parser)
    _add_routing(parser)


def _add_routing(parser: argparse.ArgumentParser) -> None:
    dispatch, router = DispatchLimits(), RouterSettings()
    group = parser.add_argument_group("routing")
    group.add_argument("--router", choices=POLICIES, default=router.policy, help="how a worker is chosen")
    group.add_argument("--overlap-weight", type=float, default=router.overlap_weight, metavar="W", help="cost of a block to prefill")
    group.add_argument("--load-weight", type=float, default=router.load_weight, metavar="W", help="cost of a block of load on a worker")
    group.add_argument(
        "--router-temperature",
        type=float,
        default=router.temperature,
        metavar="T",
        help="above 0: workers are drawn, the cheap ones likelier",
    )
    group.add_argument(
        "--router-prediction-seconds",
        type=float,
        default=router.prediction_seconds,
        metavar="SECONDS",
        help="how long a prompt is believed to be cached where it was sent, by engines that do not tell",
    )
    group.add_argument(
        "--router-sibling-seconds",
        type=float,
        default=router.sibling_seconds,
        metavar="SECONDS",
        help="the same for engines that tell, until they do: requests with one new prefix go together",
    )
    group.add_argument(
        "--router-overload-blocks",
        type=float,
        default=router.overload_blocks,
        metavar="N",
        help="a session's worker is left when its load is so many blocks above the least loaded one's",
    )
    group.add_argument(
        "--router-overload-factor",
        type=float,
        default=router.overload_factor,
        metavar="F",
        help="… and so many times what the least loaded one would have with the prompt",
    )
    group.add_argument(
        "--router-max-lead",
        type=int,
        default=router.max_lead,
        metavar="N",
        help="a worker with so many generations more than the one with the fewest gets none for its prefixes",
    )
    group.add_argument(
        "--worker-queue",
        type=int,
        default=dispatch.worker_queue,
        metavar="N",
        help="generations that wait at a worker for their first token",
    )
    group.add_argument(
        "--worker-stall",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="a worker that owes tokens and says nothing for so long is given up, and its generations go on elsewhere",
    )
    group.add_argument(
        "--worker-wait",
        type=float,
        default=dispatch.worker_wait,
        metavar="SECONDS",
        help="how long a generation waits for a worker when its model has none",
    )


def _add_responses(parser: argparse.ArgumentParser) -> None:
    limits = StoreLimits()
    group = parser.add_argument_group("stored responses")
    group.add_argument(
        "--response-store",
        metavar="PATH",
        help=f"the file that keeps responses and conversations; {NO_STORE}: they are not kept (default: penstock/responses.db in "
        "$XDG_STATE_HOME or ~/.local/state)",
    )
    group.add_argument(
        "--response-ttl",
        type=float,
        default=limits.seconds,
        metavar="SECONDS",
        help="how long responses, and unused conversations, are kept",
    )
    group.add_argument(
        "--response-store-size",
        type=float,
        default=limits.bytes / 2**20,
        metavar="MIB",
        help="what the file may hold; of what is over, the oldest go first",
    )


def _add_keys(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("API keys", "Without --key-file or an API key, anyone who reaches the port can use the server.")
    group.add_argument("--key-file", type=Path, metavar="PATH", help="keys, as hashes, with their limits; see `penstock key new --help`")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"a key that may come in; repeat for each. Others on this machine can read command lines: prefer {API_KEY_VARIABLE} in the "
        "environment (several: with commas), or --key-file",
    )
    group.add_argument("--requests-per-minute", type=int, metavar="N", help="limit of each key that has none of its own (default: none)")
    group.add_argument(
        "--tokens-per-minute", type=int, metavar="N", help="the same for tokens, of prompts and answers together (default: none)"
    )
    group.add_argument("--key-concurrency", type=int, metavar="N", help="the same for generations at once (default: none)")
    group.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="let web pages of this origin, such as https://chat.example.org, use the server; repeat for each; * for all (default: none)",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    simulator, embedded = SimulatorConfig(), EmbeddedSettings()
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--engine",
        choices=ENGINES,
        default="embedded",
        help="what makes the tokens: our own engine, a simulation, vLLM or SGLang in the worker's process, or a server that runs already",
    )
    group.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a model directory in Hugging Face's layout; or a GGUF file, for the embedded engine and http; or a hub's name, for vllm, "
        "sglang and http (default: the model that the set-up installed; for the simulator, which takes only the tokenizer, readable "
        "words; vllm, sglang and http need one)",
    )
    group.add_argument("--served-name", metavar="NAME", help="the model's name in the API (default: the file's or the directory's)")
    group.add_argument(
        "--context-length",
        type=int,
        metavar="TOKENS",
        help="prompt and answer together (default: what the model was trained for; beyond it, positions are stretched by YaRN)",
    )
    group.add_argument(
        "--tool-parser",
        default=AUTO,
        metavar="NAME",
        help=f"the format in which the model writes calls of tools: {', '.join(TOOL_FORMATS)}; {AUTO}: by its chat template; {NONE}: none",
    )
    group.add_argument(
        "--reasoning-parser",
        default=AUTO,
        metavar="NAME",
        help=f"the same for its reasoning: {', '.join(REASONING_FORMATS)}",
    )
    group.add_argument(
        "--max-batch",
        type=int,
        metavar="N",
        help=f"generations in a step; more are queued (default: {embedded.max_batch}, simulator {simulator.max_batch}; of others: theirs)",
    )
    group.add_argument(
        "--kv-blocks",
        type=int,
        metavar="N",
        help=f"KV blocks, of 16 tokens or of --block-size (default: by --kv-memory, simulator {simulator.kv_blocks}; of others: their own)",
    )
    group.add_argument(
        "--lease-share",
        type=float,
        default=embedded.lease_share,
        metavar="SHARE",
        help="most of the KV that leases protect",
    )
    group.add_argument(
        "--max-sessions", type=int, default=embedded.max_sessions, metavar="N", help="sessions at once; further ones get no lease"
    )
    group.add_argument(
        "--session-grace",
        type=float,
        default=embedded.session_grace,
        metavar="SECONDS",
        help="how much longer than its timeout a worker keeps a session that no front end closes",
    )
    group = parser.add_argument_group("embedded engine")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default=embedded.device, help="cpu: float32; cuda: bfloat16")
    group.add_argument(
        "--threads", type=int, metavar="N", help="threads of a step on the CPU (default: one a core, divided among the workers)"
    )
    group.add_argument(
        "--kv-memory", type=float, metavar="GIB", help="memory for KV (default: 2 on the CPU, 85%% of what the weights leave on a GPU)"
    )
    group.add_argument(
        "--token-budget",
        type=int,
        metavar="N",
        help="most tokens that a step computes, prompts and answers together (default: 512 on the CPU, 8192 on a GPU)",
    )
    group.add_argument(
        "--reproducible",
        action="store_true",
        help="on Intel CPUs: the same rounding whatever is computed together, so that sampled answers never depend on it; slower",
    )
    group = parser.add_argument_group("simulator")
    group.add_argument(
        "--step-ms", type=float, default=simulator.step_ms, help="time of an engine step, which makes one token a generation"
    )
    group.add_argument(
        "--prefill-rate", type=float, default=simulator.prefill_rate, metavar="TOKENS/S", help="prompt tokens computed a second"
    )
    group.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        help=f"tokens of a KV block (default: {simulator.block_size}; of other engines: their own)",
    )
    _add_foreign(parser)


def _add_foreign(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "vLLM, SGLang, and engines behind HTTP",
        "vLLM and SGLang are told --context-length, --max-batch, --kv-blocks, --block-size and, vLLM alone, --kv-memory, where they are "
        "given; for http, --context-length and --block-size are those of a server that does not tell. `penstock doctor` tells what each "
        "can do.",
    )
    group.add_argument(
        "--engine-args",
        metavar="ARGUMENTS",
        help="for vLLM or SGLang, in its own words: --engine-args='--tensor-parallel-size 2 --dtype bfloat16'",
    )
    group.add_argument("--any-engine-version", action="store_true", help="try a version of vLLM or SGLang that is not known to work")
    group.add_argument(
        "--streaming-sessions",
        action="store_true",
        help="SGLang: hold the KV of sessions so that it cannot be evicted; one turn at a time, and only what is new is sent",
    )
    group.add_argument("--url", metavar="URL", help="http: where the engine's server is")
    group.add_argument("--route", choices=get_args(Route), default="auto", help="http: how to speak with it; auto: the best that it offers")
    group.add_argument("--upstream-model", metavar="NAME", help="http: the model's name there (default: the only one that it has)")
    group.add_argument(
        "--kv-events",
        metavar="ADDRESS",
        help=f"http: where it publishes KV events, such as tcp://127.0.0.1:5557. Its API key is taken from {ENGINE_KEY_VARIABLE}",
    )
    group.add_argument("--kv-replay", metavar="ADDRESS", help="http: where it repeats KV events that were missed")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that there are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)
