"""How the real engines are told to run on a CPU, in their own words."""

from __future__ import annotations

BLOCK_SIZE = 32
"""On a CPU, vLLM takes no other than multiples of it."""


SGLANG_IMAGES = ("--mm-attention-backend", "sdpa")
"""What SGLang needs besides for a model that reads images."""


def vllm_flags(kv_bytes: int, max_batch: int) -> tuple[str, ...]:
    return (
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
        *("--kv-cache-memory-bytes", str(kv_bytes), "--max-num-seqs", str(max_batch)),
    )


def sglang_flags(kv_tokens: int, max_batch: int) -> tuple[str, ...]:
    return (
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--page-size", str(BLOCK_SIZE)),
        *("--max-total-tokens", str(kv_tokens), "--max-running-requests", str(max_batch), "--disable-cuda-graph", "--skip-server-warmup"),
    )
