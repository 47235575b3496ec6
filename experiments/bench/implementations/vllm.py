"""vLLM's build of FlashAttention, called as its attention backend calls it."""

from typing import Any

import torch

from ..operations.attention import Attention
from .flash_attn import check_limits
from .implementation import Call, Implementation

PAGE_SIZE = 16
PREFERRED_VERSION = {9: 3, 10: 4}
"""Of FlashAttention, by the major compute capability; 2 on all others."""


def attention(op: Attention) -> Call:
    check_limits("vllm", op, PAGE_SIZE)
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    window = op.config.sliding_window
    window_size = [-1, -1] if window is None else [window - 1, 0]
    version = _version(op)
    schedule = _schedule(op, window_size) if version == 3 else None
    return lambda: flash_attn_varlen_func(
        q=op.query,
        k=op.key_cache,
        v=op.value_cache,
        max_seqlen_q=op.query_len,
        cu_seqlens_q=op.query_start_loc,
        max_seqlen_k=op.seq_len,
        seqused_k=op.seq_lens,
        softmax_scale=op.scale,
        causal=True,
        window_size=window_size,
        block_table=op.block_tables,
        out=op.out,
        scheduler_metadata=schedule,
        fa_version=version,
    )


def _version(op: Attention) -> int:
    """The version of FlashAttention that vLLM takes on this GPU."""
    from vllm.vllm_flash_attn import is_fa_version_supported

    version = PREFERRED_VERSION.get(torch.cuda.get_device_capability(op.device)[0], 2)
    if version == 4 and op.config.head_size > 128:
        return 2
    return version if is_fa_version_supported(version) else 2


def _schedule(op: Attention, window_size: list[int]) -> Any:
    """How version 3 shares its work out; vLLM makes it once for all layers of a step."""
    from vllm.vllm_flash_attn import get_scheduler_metadata

    return get_scheduler_metadata(
        batch_size=op.config.batch_size,
        max_seqlen_q=op.query_len,
        max_seqlen_k=op.seq_len,
        num_heads_q=op.config.num_heads,
        num_heads_kv=op.config.num_kv_heads,
        headdim=op.config.head_size,
        cache_seqlens=op.seq_lens,
        qkv_dtype=op.query.dtype,
        cu_seqlens_q=op.query_start_loc,
        page_size=op.config.block_size,
        causal=True,
        window_size=window_size,
    )


IMPLEMENTATION = Implementation("vllm", {"attention": attention}, requires="vllm")
