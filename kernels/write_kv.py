"""Scatter new keys and values into the paged cache by slot mapping.

    slot = slot_mapping[token]
    key_cache[slot // block_size, slot % block_size] = key[token] / k_scale
    value_cache[slot // block_size, slot % block_size] = value[token] / v_scale

A slot of -1 marks a padding token: nothing is written for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .launch import (
    check_devices,
    check_scale,
    check_sizes,
    check_supported,
    check_tensor,
    check_written,
    is_interpreted,
    launch,
    next_power_of_2,
)
from .offline import DTYPES, OfflineCase
from .reference import Scale, quantized

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
KV_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _write_kv_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, head_size]
    value_ptr,  # [num_tokens, num_kv_heads, head_size]
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    slot_mapping_ptr,  # [num_tokens]
    k_scale_ptr,  # [num_kv_heads] or None
    v_scale_ptr,  # [num_kv_heads] or None
    k_scale,
    v_scale,
    num_slots,
    stride_k_scale,
    stride_v_scale,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_kc_block,
    stride_kc_slot,
    stride_kc_head,
    stride_vc_block,
    stride_vc_slot,
    stride_vc_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_D: tl.constexpr,
    QUANTIZE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if (slot < 0) | (slot >= num_slots):
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)  # [TILE_H]
    lane = tl.arange(0, TILE_D)  # [TILE_D]
    mask = (head < NUM_KV_HEADS)[:, None] & (lane < HEAD_SIZE)[None, :]  # [TILE_H, TILE_D]
    head = head.to(tl.int64)
    key = tl.load(
        key_ptr + token * stride_key_token + head[:, None] * stride_key_head + lane[None, :],
        mask=mask,
    )
    value = tl.load(
        value_ptr + token * stride_value_token + head[:, None] * stride_value_head + lane[None, :],
        mask=mask,
    )
    if QUANTIZE:
        if k_scale_ptr is not None:
            k_scale = tl.load(k_scale_ptr + head * stride_k_scale, mask=head < NUM_KV_HEADS)[
                :, None
            ]
        if v_scale_ptr is not None:
            v_scale = tl.load(v_scale_ptr + head * stride_v_scale, mask=head < NUM_KV_HEADS)[
                :, None
            ]
        # By default a clamp turns NaN into a limit.
        key = tl.clamp(
            key.to(tl.float32) / k_scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL
        )
        value = tl.clamp(
            value.to(tl.float32) / v_scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL
        )
    key_target = block * stride_kc_block + offset * stride_kc_slot + head[:, None] * stride_kc_head
    value_target = (
        block * stride_vc_block + offset * stride_vc_slot + head[:, None] * stride_vc_head
    )
    tl.store(
        key_cache_ptr + key_target + lane[None, :],
        key.to(key_cache_ptr.dtype.element_ty),
        mask=mask,
    )
    tl.store(
        value_cache_ptr + value_target + lane[None, :],
        value.to(value_cache_ptr.dtype.element_ty),
        mask=mask,
    )


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Write each token's key and value into its slot of the cache, in place.

    key, value: [num_tokens, num_kv_heads, head_size], fp16, bf16 or fp32.
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size], written; of key's
        dtype, or fp8 (e4m3fn, e5m2), which stores key / k_scale. The last stride is 1, the others
        are free.
    slot_mapping: int64 [num_tokens], block_id * block_size + offset. A slot of -1 writes nothing,
        and so does one past the cache. Two tokens with one slot leave either's values there.
    k_scale, v_scale: for fp8 caches; a number, or float32 with one element or one a KV head.

    Raises ValueError for a wrong shape, dtype, device or stride, before anything is written.

    Example, block size 4: slot_mapping [5, -1, 7] writes token 0 into block 1 at offset 1, token 2
    into block 1 at offset 3, and nothing for token 1.
    """
    num_tokens, num_kv_heads, head_size = key.shape if key.ndim == 3 else (None, None, None)
    check_tensor("key", key, (None, None, None), *KV_DTYPES)
    check_tensor("value", value, key.shape, key.dtype)
    cache_shape = (None, None, num_kv_heads, head_size)
    check_tensor("key_cache", key_cache, cache_shape, key.dtype, *FP8_DTYPES)
    check_supported("key_cache", key_cache)
    check_tensor("value_cache", value_cache, key_cache.shape, key_cache.dtype)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
    check_devices(
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
    )
    num_blocks, block_size = key_cache.shape[:2]
    check_sizes(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size)
    check_written("key_cache", key_cache)
    check_written("value_cache", value_cache)
    if num_blocks and key_cache.data_ptr() == value_cache.data_ptr():
        raise ValueError("key_cache and value_cache start at the same address")
    quantize = key_cache.dtype != key.dtype
    if not quantize and (k_scale is not None or v_scale is not None):
        raise ValueError(f"k_scale and v_scale are for fp8 caches, not {key_cache.dtype}")
    k_number, k_tensor, k_stride = check_scale("k_scale", k_scale, num_kv_heads, key.device)
    v_number, v_tensor, v_stride = check_scale("v_scale", v_scale, num_kv_heads, key.device)
    if quantize and is_interpreted(_write_kv_kernel):
        # The interpreter's cast to fp8 rounds wrongly, so it gets bytes that only move.
        key = quantized(key, k_scale, key_cache.dtype)
        value = quantized(value, v_scale, value_cache.dtype)
        quantize = False
    tile_d = next_power_of_2(head_size)
    tile_h = min(next_power_of_2(num_kv_heads), max(1, 4096 // tile_d))
    launch(
        _write_kv_kernel,
        (num_tokens, -(-num_kv_heads // tile_h)),
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        k_tensor,
        v_tensor,
        k_number,
        v_number,
        num_blocks * block_size,
        k_stride,
        v_stride,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        TILE_H=tile_h,
        TILE_D=tile_d,
        QUANTIZE=quantize,
        LIMIT=torch.finfo(key_cache.dtype).max,
        num_warps=4,
    )


def offline_cases() -> Iterator[OfflineCase]:
    """One case a cache dtype; fp8 caches take bf16 keys."""
    for name, dtype in DTYPES.items():
        yield OfflineCase("write_kv", name, lambda dtype=dtype: _example(dtype))


def _example(cache_dtype: torch.dtype) -> None:
    dtype = torch.bfloat16 if cache_dtype in FP8_DTYPES else cache_dtype
    key = torch.zeros(2, 8, 128, dtype=dtype)
    cache = torch.zeros(2, 16, 8, 128, dtype=dtype).to(cache_dtype)
    write_kv(key, key.clone(), cache, cache.clone(), torch.zeros(2, dtype=torch.int64))
