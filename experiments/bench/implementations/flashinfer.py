"""FlashInfer's attention over a paged cache, planned once as for all layers of a step."""

from typing import Any

import torch

from ...results import AbsentError
from ..operations.attention import Attention
from .implementation import Call, Implementation

HEAD_SIZES = (64, 128, 256)
WORKSPACE_BYTES = 256 * 2**20
TENSOR_CORE_GROUP = 4
"""Query heads a KV head from which on decode is faster on tensor cores, as its documents say."""


def attention(op: Attention) -> Call:
    config = op.config
    if op.query.dtype == torch.float32:
        raise AbsentError("flashinfer needs fp16 or bf16, not fp32")
    if config.head_size not in HEAD_SIZES:
        raise AbsentError(f"flashinfer needs a head size of 64, 128 or 256, not {config.head_size}")
    wrapper = _decode(op) if op.query_len == 1 else _prefill(op)
    caches = (op.key_cache, op.value_cache)
    return lambda: wrapper.run(op.query, caches, out=op.out)


def _decode(op: Attention) -> Any:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    config = op.config
    indptr, indices, last_page_len = _pages(op)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(op),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=config.num_heads // config.num_kv_heads >= TENSOR_CORE_GROUP,
        paged_kv_indptr_buffer=torch.empty_like(indptr),
        paged_kv_indices_buffer=torch.empty_like(indices),
        paged_kv_last_page_len_buffer=torch.empty_like(last_page_len),
        backend=_backend(op),
    )
    wrapper.plan(
        indptr,
        indices,
        last_page_len,
        config.num_heads,
        config.num_kv_heads,
        config.head_size,
        config.block_size,
        **_options(op),
    )
    return wrapper


def _prefill(op: Attention) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    config = op.config
    indptr, indices, last_page_len = _pages(op)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        _workspace(op),
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=torch.empty_like(op.query_start_loc),
        paged_kv_indptr_buf=torch.empty_like(indptr),
        paged_kv_indices_buf=torch.empty_like(indices),
        paged_kv_last_page_len_buf=torch.empty_like(last_page_len),
        backend=_backend(op),
    )
    wrapper.plan(
        op.query_start_loc,
        indptr,
        indices,
        last_page_len,
        config.num_heads,
        config.num_kv_heads,
        config.head_size,
        config.block_size,
        causal=True,
        **_options(op),
    )
    return wrapper


def _pages(op: Attention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int32 (starts in the list of pages, the list, tokens in each sequence's last page)."""
    batch, blocks_each = op.block_tables.shape
    starts = torch.arange(batch + 1, dtype=torch.int32, device=op.device) * blocks_each
    in_last = op.seq_len - (blocks_each - 1) * op.config.block_size
    return starts, op.block_tables.flatten(), torch.full_like(op.seq_lens, in_last)


def _workspace(op: Attention) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=op.device)


def _backend(op: Attention) -> str:
    """The one that reads an fp8 cache for wider queries, which is not always found by itself."""
    return "auto" if op.key_cache.dtype == op.query.dtype else "fa2"


def _options(op: Attention) -> dict[str, Any]:
    window = op.config.sliding_window
    return {
        "window_left": -1 if window is None else window - 1,
        "q_data_type": op.query.dtype,
        "kv_data_type": op.key_cache.dtype,
        "sm_scale": op.scale,
    }


IMPLEMENTATION = Implementation(
    "flashinfer", {"attention": attention}, requires="flashinfer", distribution="flashinfer-python"
)
