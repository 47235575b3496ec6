"""FlashAttention 2 over a paged cache."""

import torch

from ...results import AbsentError
from ..operations.attention import Attention
from .implementation import Call, Implementation

MAX_HEAD_SIZE = 256
PAGE_SIZE = 256


def attention(op: Attention) -> Call:
    """By its decode function, or by its ragged one, which reads the block table, too."""
    check_limits("flash_attn", op, PAGE_SIZE)
    return _decode(op) if op.query_len == 1 else _prefill(op)


def check_limits(name: str, op: Attention, page_size: int) -> None:
    """Raise AbsentError for what no build of FlashAttention takes; blocks are whole pages."""
    config = op.config
    if op.query.dtype == torch.float32:
        raise AbsentError(f"{name} needs fp16 or bf16, not fp32")
    if op.key_cache.dtype != op.query.dtype:
        raise AbsentError(f"{name} has no fp8 cache beside {config.dtype} queries")
    if config.head_size % 8 or config.head_size > MAX_HEAD_SIZE:
        raise AbsentError(
            f"{name} needs a head size divisible by 8, of {MAX_HEAD_SIZE} at most, "
            f"not {config.head_size}"
        )
    if config.block_size % page_size:
        raise AbsentError(
            f"{name} needs block sizes divisible by {page_size}, not {config.block_size}"
        )


def _decode(op: Attention) -> Call:
    from flash_attn import flash_attn_with_kvcache

    query = op.query[:, None]  # [batch_size, 1, num_heads, head_size]
    return lambda: flash_attn_with_kvcache(
        query,
        op.key_cache,
        op.value_cache,
        cache_seqlens=op.seq_lens,
        block_table=op.block_tables,
        softmax_scale=op.scale,
        causal=True,
        window_size=_window(op),
    )[:, 0]


def _prefill(op: Attention) -> Call:
    from flash_attn import flash_attn_varlen_func

    batch = torch.arange(op.config.batch_size + 1, dtype=torch.int32, device=op.device)
    key_start_loc = batch * op.seq_len
    return lambda: flash_attn_varlen_func(
        op.query,
        op.key_cache,
        op.value_cache,
        op.query_start_loc,
        key_start_loc,
        op.query_len,
        op.seq_len,
        softmax_scale=op.scale,
        causal=True,
        window_size=_window(op),
        block_table=op.block_tables,
    )


def _window(op: Attention) -> tuple[int, int]:
    window = op.config.sliding_window
    return (-1, -1) if window is None else (window - 1, 0)


IMPLEMENTATION = Implementation(
    "flash_attn", {"attention": attention}, requires="flash_attn", distribution="flash-attn"
)
