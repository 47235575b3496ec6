"""Our attention as an attention implementation of transformers, so that model code stays theirs.

A model whose implementation is `IMPLEMENTATION` calls `paged_attention_forward` in every layer,
which writes the new tokens' keys and values into the paged cache and attends over it. What a step
needs beside the projections (`AttentionStep`) reaches it as a keyword argument of the model call.
A batch is ragged: one row of tokens, and `query_start_loc` says where each sequence begins.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from transformers import AttentionInterface

from kernels import paged_attention, reference, write_kv
from kernels.kv_cache import KVCache

IMPLEMENTATION = "prefixlab_paged"


@dataclass(frozen=True)
class AttentionOps:
    """One backend for the two operations of a layer; `is_triton` tells which."""

    paged_attention: Callable[..., torch.Tensor]
    write_kv: Callable[..., None]
    is_triton: bool


OPS = {
    "torch": AttentionOps(reference.paged_attention, reference.write_kv, is_triton=False),
    "triton": AttentionOps(paged_attention.paged_attention, write_kv.write_kv, is_triton=True),
}


@dataclass(frozen=True)
class AttentionStep:
    """What the attention of all layers needs to know of one forward pass."""

    kv_cache: KVCache
    ops: AttentionOps
    slot_mapping: torch.Tensor
    """int64 [num_tokens]"""
    block_tables: torch.Tensor
    """int32 [num_seqs, max_blocks]"""
    seq_lens: torch.Tensor
    """int32 [num_seqs], the new tokens included"""
    query_start_loc: torch.Tensor
    """int32 [num_seqs + 1]"""
    max_query_len: int


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_size]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_size]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_size]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: AttentionStep,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [num_heads], GPT-OSS's sinks
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values, then attend; [1, num_tokens, num_heads, head_size]."""
    if attention_mask is not None:
        raise ValueError("paged attention masks by sequence lengths; pass no attention_mask")
    query, key, value = (rearrange(x, "1 h t d -> t h d").contiguous() for x in (query, key, value))
    key_cache = paged.kv_cache.key_caches[module.layer_idx]
    value_cache = paged.kv_cache.value_caches[module.layer_idx]
    paged.ops.write_kv(key, value, key_cache, value_cache, paged.slot_mapping)
    hints = {"max_query_len": paged.max_query_len} if paged.ops.is_triton else {}
    out = paged.ops.paged_attention(
        query,
        key_cache,
        value_cache,
        paged.block_tables,
        paged.seq_lens,
        paged.query_start_loc,
        scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.detach().float(),
        **hints,
    )
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
