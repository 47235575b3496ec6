"""Merging attention over disjoint sets of keys by their log-sum-exp.

    lse = log(sum_i exp(lse_i))        out = sum_i exp(lse_i - lse) * out_i

It joins the splits of a decode step, and attention over a shared prefix with that over the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .launch import (
    check_devices,
    check_sizes,
    check_tensor,
    check_written,
    is_interpreted,
    launch,
    next_power_of_2,
)
from .offline import DTYPES, OfflineCase

DTYPES_IN = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit(
    do_not_specialize=["num_states", "stride_lses_state"],
    do_not_specialize_on_alignment=["lse_ptr", "lses_ptr", "num_tokens_ptr"],
)
def _merge_states_kernel(
    out_ptr,  # [num_tokens, num_heads, head_size]
    lse_ptr,  # [num_tokens, num_heads] or None
    outs_ptr,  # [num_states, num_tokens, num_heads, head_size]
    lses_ptr,  # [num_states, num_tokens, num_heads]
    num_tokens_ptr,  # [] or None: rows from here on are left alone
    num_states,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_outs_state,
    stride_outs_token,
    stride_outs_head,
    stride_lses_state,
    stride_lses_token,
    stride_lses_head,
    HEAD_SIZE: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    # Triton has no short-circuit `and`, and None can't be loaded.
    if num_tokens_ptr is not None:  # noqa: SIM102
        if token >= tl.load(num_tokens_ptr):
            return
    lane = tl.arange(0, TILE_D)  # [TILE_D]
    state = tl.arange(0, TILE_S)  # [TILE_S]
    lses_ptr += token * stride_lses_token + head * stride_lses_head
    outs_ptr += token * stride_outs_token + head * stride_outs_head

    largest = tl.full([TILE_S], float("-inf"), tl.float32)
    for start in range(0, num_states, TILE_S):
        index = (start + state).to(tl.int64)
        lses = tl.load(
            lses_ptr + index * stride_lses_state, mask=index < num_states, other=float("-inf")
        )
        largest = tl.maximum(largest, lses)
    shift = tl.max(largest, axis=0)
    # All states may be empty; -inf minus -inf would be NaN.
    shift = tl.where(shift == float("-inf"), 0.0, shift)

    total = tl.zeros([TILE_S], tl.float32)
    merged = tl.zeros([TILE_S, TILE_D], tl.float32)
    for start in range(0, num_states, TILE_S):
        index = (start + state).to(tl.int64)
        lses = tl.load(
            lses_ptr + index * stride_lses_state, mask=index < num_states, other=float("-inf")
        )
        weights = tl.exp(lses - shift)  # [TILE_S]
        outs = tl.load(
            outs_ptr + index[:, None] * stride_outs_state + lane[None, :],
            mask=(weights > 0)[:, None] & (lane < HEAD_SIZE)[None, :],
            other=0.0,
        ).to(tl.float32)  # [TILE_S, TILE_D]
        total += weights
        merged += outs * weights[:, None]
    total = tl.sum(total, axis=0)
    divisor = tl.where(total == 0.0, 1.0, total)
    out = tl.sum(merged, axis=0) / divisor  # [TILE_D]
    tl.store(
        out_ptr + token * stride_out_token + head * stride_out_head + lane,
        out.to(out_ptr.dtype.element_ty),
        mask=lane < HEAD_SIZE,
    )
    if lse_ptr is not None:
        lse = tl.where(total == 0.0, float("-inf"), shift + tl.log(divisor))
        tl.store(lse_ptr + token * stride_lse_token + head * stride_lse_head, lse)


def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial attention results into (out, lse) over the union of their keys.

    outs: [num_states, num_tokens, num_heads, head_size], fp16, bf16 or fp32.
    lses: float32 [num_states, num_tokens, num_heads], natural logarithm; -inf for a state without
        keys, whose outs are then never read.
    out: [num_tokens, num_heads, head_size], written; new and of outs' dtype if None.
    lse: float32 [num_tokens, num_heads], written; new if None. Rows without any keys give zeros
        and -inf.

    Raises ValueError for a wrong shape, dtype, device or stride.

    Example: two states with outs 1.0 and 3.0 and lses log(1) and log(3) give out 2.5, lse log(4).

    Ye et al., FlashInfer (2025), section 2.2: the merge is associative and commutative.
    """
    check_tensor("outs", outs, (None, None, None, None), *DTYPES_IN)
    if outs.shape[0] < 1:
        raise ValueError("outs has no states to merge")
    check_sizes(num_heads=outs.shape[2], head_size=outs.shape[3])
    check_tensor("lses", lses, outs.shape[:3], torch.float32, contiguous_last=False)
    if out is None:
        out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    if lse is None:
        lse = torch.empty(outs.shape[1:3], dtype=torch.float32, device=outs.device)
    check_tensor("out", out, outs.shape[1:], *DTYPES_IN)
    check_tensor("lse", lse, outs.shape[1:3], torch.float32, contiguous_last=False)
    check_written("out", out)
    check_written("lse", lse)
    check_devices(outs=outs, lses=lses, out=out, lse=lse)
    launch_merge(outs, lses, out, lse, None)
    return out, lse


def launch_merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> None:
    """`merge_states` without checks; rows from `num_tokens` (int32, one element) on stay as is."""
    num_states, num_rows, num_heads, head_size = outs.shape
    target = out
    if out.dtype == torch.bfloat16 and is_interpreted(_merge_states_kernel):
        # The interpreter truncates to bfloat16; torch rounds.
        target = out.float()
    launch(
        _merge_states_kernel,
        (num_rows, num_heads),
        target,
        lse,
        outs,
        lses,
        num_tokens,
        num_states,
        *target.stride()[:2],
        *(lse.stride() if lse is not None else (0, 0)),
        *outs.stride()[:3],
        *lses.stride(),
        HEAD_SIZE=head_size,
        TILE_S=4,
        TILE_D=next_power_of_2(head_size),
        num_warps=1 if head_size <= 128 else 4,
    )
    if target is not out:
        out.copy_(target)


def offline_cases() -> Iterator[OfflineCase]:
    """One case a dtype that attention gives out."""
    for name in ("fp16", "bf16", "fp32"):
        yield OfflineCase("merge_states", name, lambda dtype=DTYPES[name]: _example(dtype))


def _example(dtype: torch.dtype) -> None:
    merge_states(torch.zeros(4, 2, 8, 128, dtype=dtype), torch.zeros(4, 2, 8))
