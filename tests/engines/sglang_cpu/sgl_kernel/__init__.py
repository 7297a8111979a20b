"""Stands in for SGLang's package of kernels, which has no build for CPUs where pip looks.

It has no kernel. SGLang imports these names when it starts on a CPU and calls them only for speculative decoding; a dense model with the
attention backend `torch_native` is computed by torch alone. So whatever is called here raises, and what is not named here is not found,
as in a build without it: SGLang then takes its own path in torch, also on a CPU that has AMX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch


def _absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but this is a stand-in without kernels: only dense models, on torch_native"
        )

    return kernel


assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _absent("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")

# Models that read images are imported together with others, which take these from torch at import. None of them is called.
for _operator in (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
):
    torch.library.define(f"sgl_kernel::{_operator}", "(Tensor given) -> Tensor")
