"""How vLLM hands a prompt's KV to another vLLM: through its NIXL connector. Pure: vLLM is not imported here."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs

from penstock.backends.external.engine import KvMoves
from penstock.backends.external.handover import HandoverFailed, Ticket
from penstock.config.engines import EngineSettings

CONNECTOR = "NixlConnector"
LEASE_SECONDS = 12
"""vLLM's default is 30. It cannot give memory back before: nobody can tell it that the other engine is gone."""
DEFAULT_LEASE_SECONDS = 30

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"

FOR_ANOTHER_ENGINE: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""vLLM's parameters of a request whose KV another engine takes."""

_Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[\w.:-]+$")]
_Size = Annotated[int, Meta(ge=1, le=4096)]
_Block = Annotated[int, Meta(ge=0, lt=2**31)]


class Whereabouts(Struct, frozen=True, omit_defaults=True, gc=False):
    """Where vLLM has a prompt's KV, in its own words: the fields of `kv_transfer_params` that the other engine reads."""

    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Name
    remote_port: Annotated[int, Meta(ge=1, lt=2**16)]
    remote_block_ids: Annotated[list[Annotated[list[_Block], Meta(max_length=2**18)]], Meta(min_length=1, max_length=64)]
    tp_size: _Size
    dcp_size: _Size = 1
    pp_size: _Size = 1
    remote_num_tokens: Annotated[int, Meta(ge=0, lt=2**31)] = 0


_DECODER = msgspec.msgpack.Decoder(Whereabouts)


def ticket_of(output: Any, lease_seconds: float, now: tuple[float, float]) -> bytes:
    """The ticket that comes with vLLM's last output; empty if it has none. The lease began when vLLM's core made that output. `now` is the
    time by the clock of that, which counts from the start of the machine, and the time of day."""
    found = output.kv_transfer_params
    if not found or not found.get("do_remote_prefill") or found.get("transfer_mode", "pull") != "pull":
        return b""
    where = msgspec.convert({name: found[name] for name in Whereabouts.__struct_fields__ if name in found}, Whereabouts)
    made = now[1] - (now[0] - (getattr(output.metrics, "last_token_ts", 0.0) or now[0]))
    return Ticket(made, lease_seconds, msgspec.msgpack.encode(where)).pack()


def transfer_parameters(body: bytes, tokens: int, block_size: int) -> dict[str, Any]:
    """vLLM's parameters of a request that takes the KV of another engine. Raises HandoverFailed if they do not fit the prompt: vLLM's core
    would end."""
    try:
        where = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoverFailed(f"vLLM's part of the ticket cannot be read: {error}") from error
    needed, groups = -(-tokens // block_size), where.remote_block_ids
    # With one kind of attention all blocks are there. With several, some kinds need only the last ones.
    if any(not group or len(group) > needed for group in groups) or (len(groups) == 1 and len(groups[0]) != needed):
        raise HandoverFailed(f"the ticket has {[len(group) for group in groups]} blocks: a prompt of {tokens} tokens needs {needed}")
    defaults = {"dcp_size": where.dcp_size, "pp_size": where.pp_size}
    return {"do_remote_prefill": True, "do_remote_decode": False, **structs.asdict(where), **defaults}


def connector_settings(settings: EngineSettings) -> dict[str, Any] | None:
    """The fields of vLLM's KVTransferConfig for a worker with a role. None for an aggregated one."""
    if settings.role == "aggregated":
        return None
    return {
        "kv_connector": CONNECTOR,
        # Each worker can do both: the role is only what it prefers.
        "kv_role": "kv_both",
        # The worker itself computes what did not come: sooner than vLLM does, and vLLM's own way gave wrong tokens once.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
    }


def moves_of(config: Any, version: str) -> KvMoves | None:
    """How the KV of this engine moves. None without the connector."""
    transfer = config.kv_transfer_config
    if transfer is None or not transfer.has_connector(CONNECTOR):
        return None
    cache, model = config.cache_config, config.model_config
    meaning = (version, model.model, model.dtype, cache.cache_dtype, cache.block_size)
    return KvMoves("ticket", hashlib.blake2b(repr(meaning).encode(), digest_size=16).digest(), block_bytes=_block_bytes(config))


def lease_of(config: Any) -> float:
    return float(config.kv_transfer_config.get_from_extra_config("kv_lease_duration", DEFAULT_LEASE_SECONDS))


def _block_bytes(config: Any) -> int:
    """Of all layers, on all devices, if every layer has keys and values."""
    model, parallel = config.model_config, config.parallel_config
    numbers = 2 * model.get_num_layers(parallel) * parallel.pipeline_parallel_size
    numbers *= model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size * model.get_head_size()
    return int(numbers * model.dtype.itemsize * config.cache_config.block_size)
