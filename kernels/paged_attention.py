"""Attention over a paged KV cache: prefill, chunked prefill and decode in one ragged batch.

    score(q, k) = softcap * tanh(scale * dot(q, k) / softcap) + slope * (position(k) - position(q))
    out(q) = sum_k exp(score(q, k)) * v_k / (exp(sink) + sum_k exp(score(q, k)))

over the keys that the query sees: not after its own position, and within the window. A program
takes a tile of query rows, which are query tokens x the query heads of one KV head, and walks over
the keys in tiles that span as many blocks as needed, so a key is read once for all heads that share
it. When there are too few programs to fill the device the keys are split among several, and
`merge_states` joins their results.

Dao, FlashAttention-2 (2023); Kwon et al., PagedAttention (2023); Dao et al., Flash-Decoding (2023).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .launch import (
    are_aligned,
    attention_tiles,
    cdiv,
    check_devices,
    check_integer,
    check_positive,
    check_scale,
    check_supported,
    check_tensor,
    check_written,
    is_interpreted,
    launch,
    num_kv_splits,
    target_of,
)
from .merge_states import launch_merge
from .offline import DTYPES, OfflineCase
from .reference import Scale
from .write_kv import FP8_DTYPES, KV_DTYPES

MAX_HEAD_SIZE = 576
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softcap(scores, softcap):
    """softcap * tanh(scores / softcap), without overflow and without cancellation near 0."""
    x = scores / softcap
    # tanh(|x|) = (1 - t) / (1 + t) with t = exp(-2 |x|), which loses digits where t is near 1.
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - decay) / (1.0 + decay)
    far = tl.where(x < 0, -far, far)
    x2 = x * x
    near = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    return softcap * tl.where(x2 < 0.0625, near, far)


@triton.jit(
    do_not_specialize=["num_seqs", "sliding_window", "stride_table", "stride_lse_split"],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "block_tables_ptr",
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "alibi_slopes_ptr",
        "sinks_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
    ],
)
def _paged_attention_kernel(
    out_ptr,  # [num_splits, num_tokens, num_heads, head_size]
    lse_ptr,  # [num_splits, num_tokens, num_heads] or None
    query_ptr,  # [num_tokens, num_heads, head_size]
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    block_tables_ptr,  # [num_seqs, max_blocks]
    seq_lens_ptr,  # [num_seqs]
    query_start_loc_ptr,  # [num_seqs + 1]
    alibi_slopes_ptr,  # [num_heads] or None
    sinks_ptr,  # [num_heads] or None
    k_scale_ptr,  # [num_kv_heads] or None
    v_scale_ptr,  # [num_kv_heads] or None
    scale,
    v_scale,
    softcap,
    sliding_window,
    num_seqs,
    stride_out_split,
    stride_out_token,
    stride_out_head,
    stride_lse_split,
    stride_lse_token,
    stride_lse_head,
    stride_query_token,
    stride_query_head,
    stride_kc_block,
    stride_kc_slot,
    stride_kc_head,
    stride_vc_block,
    stride_vc_slot,
    stride_vc_head,
    stride_table,
    stride_k_scale,
    stride_v_scale,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_T: tl.constexpr,
    ONE_TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (GROUP + TILE_H - 1) // TILE_H
    tile = tl.program_id(0)
    kv_head = (tl.program_id(1) // HEAD_TILES).to(tl.int64)
    head_tile = tl.program_id(1) % HEAD_TILES
    split = tl.program_id(2)

    # Sequence i owns the tiles from query_start_loc[i] // TILE_Q + i on: enough for its queries,
    # and in all a count that the host knows without reading any length. With ONE_TILE it owns tile
    # i alone.
    if ONE_TILE:
        seq = tile
        first_query = 0
    else:
        seq = tile * 0
        end = num_seqs
        while end - seq > 1:
            middle = (seq + end) // 2
            starts_later = tl.load(query_start_loc_ptr + middle) // TILE_Q + middle > tile
            end = tl.where(starts_later, middle, end)
            seq = tl.where(starts_later, seq, middle)
        first_query = (tile - tl.load(query_start_loc_ptr + seq) // TILE_Q - seq) * TILE_Q
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    context_len = seq_len - query_len

    row = tl.arange(0, TILE_M)  # [TILE_M]
    group_head = head_tile * TILE_H + row % TILE_H  # [TILE_M]
    query_index = first_query + row // TILE_H  # [TILE_M]
    row_ok = (row < TILE_Q * TILE_H) & (query_index < query_len) & (group_head < GROUP)
    position = context_len + query_index  # [TILE_M]
    token = query_start.to(tl.int64) + query_index  # [TILE_M]
    head = kv_head * GROUP + group_head  # [TILE_M]
    # A head of 576 is 512 lanes and a tail of 64: padded to 1,024 it would not fit.
    HAS_TAIL: tl.constexpr = TILE_T > 0
    lane = tl.arange(0, TILE_D)  # [TILE_D]
    lane_ok = lane < HEAD_SIZE
    query_rows = query_ptr + token * stride_query_token + head * stride_query_head  # [TILE_M]
    query = tl.load(
        query_rows[:, None] + lane[None, :], mask=row_ok[:, None] & lane_ok[None, :], other=0.0
    ).to(DOT_DTYPE)  # [TILE_M, TILE_D]
    if HAS_TAIL:
        tail = TILE_D + tl.arange(0, TILE_T)  # [TILE_T]
        tail_ok = tail < HEAD_SIZE
        query_tail = tl.load(
            query_rows[:, None] + tail[None, :], mask=row_ok[:, None] & tail_ok[None, :], other=0.0
        ).to(DOT_DTYPE)  # [TILE_M, TILE_T]
        acc_tail = tl.zeros([TILE_M, TILE_T], tl.float32)

    # Keys that any row of the tile sees: [first_key, end_key).
    end_key = seq_len
    if CAUSAL:
        end_key = tl.minimum(context_len + tl.minimum(first_query + TILE_Q, query_len), seq_len)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(context_len + first_query - sliding_window + 1, 0)
    first_tile = first_key // TILE_N
    end_tile = tl.maximum((end_key + TILE_N - 1) // TILE_N, first_tile)
    tiles_per_split = (end_tile - first_tile + tl.num_programs(2) - 1) // tl.num_programs(2)
    first_tile = tl.minimum(first_tile + split * tiles_per_split, end_tile)
    end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)

    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr + kv_head * stride_k_scale)
    if v_scale_ptr is not None:
        v_scale = v_scale * tl.load(v_scale_ptr + kv_head * stride_v_scale)
    # Scores in units of log 2: exp2 is one instruction, and the factor goes into its argument.
    factor = scale * LOG2E
    if HAS_SOFTCAP:
        factor = 1.0
    if alibi_slopes_ptr is not None:
        factor = 1.0
        slope = tl.load(alibi_slopes_ptr + head, mask=row_ok, other=0.0)  # [TILE_M]

    largest = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    if sinks_ptr is not None:
        # A sink is counted once, and only beside a visible key.
        sink_keys = tl.where(split == 0, seq_len, 0)
        # A tensor & a scalar condition is no mask to the interpreter of Triton 3.9.
        takes_sink = row_ok & (row * 0 + sink_keys > 0)
        if CAUSAL:
            takes_sink = takes_sink & (position >= 0)
        sink = tl.load(sinks_ptr + head, mask=takes_sink, other=float("-inf")).to(tl.float32)
        largest = sink * LOG2E
        total = tl.where(largest > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)

    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
    key_ptr = key_cache_ptr + kv_head * stride_kc_head
    value_ptr = value_cache_ptr + kv_head * stride_vc_head
    for start in range(first_tile * TILE_N, end_tile * TILE_N, TILE_N):
        key_position = start + tl.arange(0, TILE_N)  # [TILE_N]
        key_ok = key_position < end_key
        if HAS_WINDOW:
            key_ok = key_ok & (key_position >= first_key)
        block = tl.load(table_ptr + key_position // BLOCK_SIZE, mask=key_ok, other=0)
        block = block.to(tl.int64)
        slot = key_position % BLOCK_SIZE
        key_offset = block * stride_kc_block + slot * stride_kc_slot  # [TILE_N]
        value_offset = key_offset
        if not SAME_STRIDES:
            value_offset = block * stride_vc_block + slot * stride_vc_slot
        kv_mask = key_ok[:, None] & lane_ok[None, :]
        key = tl.load(key_ptr + key_offset[:, None] + lane[None, :], mask=kv_mask, other=0.0)
        value = tl.load(value_ptr + value_offset[:, None] + lane[None, :], mask=kv_mask, other=0.0)
        key = key.to(DOT_DTYPE)  # [TILE_N, TILE_D]
        value = value.to(DOT_DTYPE)  # [TILE_N, TILE_D]
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")  # [TILE_M, TILE_N]
        if HAS_TAIL:
            tail_mask = key_ok[:, None] & tail_ok[None, :]
            key_tail = tl.load(
                key_ptr + key_offset[:, None] + tail[None, :], mask=tail_mask, other=0.0
            ).to(DOT_DTYPE)  # [TILE_N, TILE_T]
            value_tail = tl.load(
                value_ptr + value_offset[:, None] + tail[None, :], mask=tail_mask, other=0.0
            ).to(DOT_DTYPE)  # [TILE_N, TILE_T]
            scores = tl.dot(query_tail, tl.trans(key_tail), scores, input_precision="ieee")
        if HAS_SOFTCAP:
            scores = _softcap(scores * scale, softcap)
            if alibi_slopes_ptr is None:
                scores = scores * LOG2E
        if alibi_slopes_ptr is not None:
            if not HAS_SOFTCAP:
                scores = scores * scale
            distance = (key_position[None, :] - position[:, None]).to(tl.float32)
            scores = (scores + slope[:, None] * distance) * LOG2E
        visible = key_ok[None, :]
        if TILE_Q > 1:
            if CAUSAL:
                visible = visible & (key_position[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible = visible & (key_position[None, :] > position[:, None] - sliding_window)
        scores = tl.where(visible, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, axis=1) * factor)
        # A row may have seen no key yet; -inf minus -inf would be NaN.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores * factor - shift[:, None])
        decay = tl.exp2(largest - shift)
        total = total * decay + tl.sum(weights, axis=1)
        weights = weights.to(DOT_DTYPE)
        acc = tl.dot(weights, value, acc * decay[:, None], input_precision="ieee")
        if HAS_TAIL:
            acc_tail = tl.dot(
                weights, value_tail, acc_tail * decay[:, None], input_precision="ieee"
            )
        largest = new_largest

    divisor = tl.where(total == 0.0, 1.0, total)
    norm = (v_scale / divisor)[:, None]
    out_rows = out_ptr + split.to(tl.int64) * stride_out_split
    out_rows += token * stride_out_token + head * stride_out_head  # [TILE_M]
    tl.store(
        out_rows[:, None] + lane[None, :],
        (acc * norm).to(out_ptr.dtype.element_ty),
        mask=row_ok[:, None] & lane_ok[None, :],
    )
    if HAS_TAIL:
        tl.store(
            out_rows[:, None] + tail[None, :],
            (acc_tail * norm).to(out_ptr.dtype.element_ty),
            mask=row_ok[:, None] & tail_ok[None, :],
        )
    if lse_ptr is not None:
        lse = tl.where(total == 0.0, float("-inf"), (largest + tl.log2(divisor)) * LN2)
        tl.store(
            lse_ptr
            + split.to(tl.int64) * stride_lse_split
            + token * stride_lse_token
            + head * stride_lse_head,
            lse,
            mask=row_ok,
        )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    max_query_len: int | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's newest tokens over its cached keys and values.

    query: [num_tokens, num_heads, head_size], fp16, bf16 or fp32; sequence i's rows are
        query_start_loc[i] to query_start_loc[i + 1], the last positions of its seq_lens[i] tokens.
        Rows from query_start_loc[-1] on are neither read nor written.
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size], of query's dtype or
        fp8 (e4m3fn, e5m2). The last stride is 1, the others are free. The new tokens' keys and
        values are in it already.
    block_tables: int32 [num_seqs, max_blocks]; entries past a sequence's length are never read.
    seq_lens: int32 [num_seqs]. query_start_loc: int32 [num_seqs + 1], from 0 up.
    scale: multiplies the dot products; positive.
    sliding_window: a query sees this many keys, its own included. Needs causal.
    softcap: scores become softcap * tanh(score / softcap), before masking.
    alibi_slopes, sinks: float32 [num_heads].
    k_scale, v_scale: for fp8 caches; a number, or float32 with one element or one a KV head.
    out: written; new and of query's shape and dtype if None.
    max_query_len: the longest query, if the host knows it. It saves decode steps a search.
    num_splits: into how many parts the keys are split; from the batch and the device if None.

    Returns out, or (out, lse) with lse float32 [num_tokens, num_heads], the natural logarithm of
    the softmax's denominator, sink included. A row that sees no key gives zeros and -inf.

    Raises ValueError for a wrong shape, dtype, device, stride or option, before anything is
    written.

    Example: block size 4, block_tables [[7, 2]], seq_lens [6], query_start_loc [0, 2]: the queries
    are positions 4 and 5; they see slots 28 to 31 and 8, and the second one slot 9 too.
    """
    num_tokens, num_heads, head_size = _check_arguments(
        query, key_cache, value_cache, block_tables, seq_lens, query_start_loc
    )
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_seqs, max_blocks = block_tables.shape
    _check_options(scale, causal, sliding_window, softcap, max_query_len, num_splits)
    for name, tensor in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if tensor is not None:
            check_tensor(name, tensor, (num_heads,), torch.float32)
    if key_cache.dtype == query.dtype and (k_scale is not None or v_scale is not None):
        raise ValueError(f"k_scale and v_scale are for fp8 caches, not {key_cache.dtype}")
    k_number, k_tensor, k_stride = check_scale("k_scale", k_scale, num_kv_heads, query.device)
    v_number, v_tensor, v_stride = check_scale("v_scale", v_scale, num_kv_heads, query.device)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    check_tensor("out", out, query.shape, query.dtype)
    check_written("out", out)
    check_devices(query=query, out=out, alibi_slopes=alibi_slopes, sinks=sinks)
    lse = None
    if return_lse:
        lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=query.device)
    if num_seqs == 0:
        return (out, lse) if return_lse else out

    target = target_of(query.device)
    group = num_heads // num_kv_heads
    tiles = attention_tiles(
        target,
        head_size,
        group,
        key_cache.dtype.itemsize,
        query.dtype.itemsize,
        decode=max_query_len == 1 or (max_query_len is None and num_tokens == num_seqs),
        aligned=are_aligned(key_cache, value_cache),
    )
    one_tile = max_query_len is not None and max_query_len <= tiles.tile_q
    grid_tiles = num_seqs if one_tile else num_tokens // tiles.tile_q + num_seqs
    grid_heads = num_kv_heads * cdiv(group, tiles.tile_h)
    if num_splits is None:
        num_splits = num_kv_splits(target, grid_tiles * grid_heads, max_blocks * block_size)

    interpreted = is_interpreted(_paged_attention_kernel)
    target_out, target_lse = out, lse
    if num_splits > 1:
        # 16 always divides the stride of a split, so no batch compiles another kernel.
        size = 16 * cdiv(query.numel(), 16)
        target_out = torch.empty(num_splits, size, dtype=torch.float32, device=query.device)
        target_out = target_out[:, : query.numel()].unflatten(1, query.shape)
        shape = (num_splits, num_tokens, num_heads)
        target_lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    elif interpreted and out.dtype == torch.bfloat16:
        # The interpreter truncates to bfloat16; torch rounds.
        target_out = out.float()
    launch(
        _paged_attention_kernel,
        (grid_tiles, grid_heads, num_splits),
        target_out,
        target_lse,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        alibi_slopes,
        sinks,
        k_tensor,
        v_tensor,
        float(scale) * k_number,
        v_number,
        float(softcap or 0.0),
        sliding_window or 0,
        num_seqs,
        *((0,) if num_splits == 1 else target_out.stride()[:1]),
        *target_out.stride()[-3:-1],
        *((0,) if num_splits == 1 else target_lse.stride()[:1]),
        *((0, 0) if target_lse is None else target_lse.stride()[-2:]),
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        k_stride,
        v_stride,
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        TILE_M=tiles.tile_m,
        TILE_Q=tiles.tile_q,
        TILE_H=tiles.tile_h,
        TILE_N=tiles.tile_n,
        TILE_D=tiles.tile_d,
        TILE_T=tiles.tile_t,
        ONE_TILE=one_tile,
        CAUSAL=causal,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFTCAP=softcap is not None,
        SAME_STRIDES=key_cache.stride() == value_cache.stride(),
        DOT_DTYPE=_dot_dtype(query.dtype, interpreted),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if num_splits > 1:
        launch_merge(target_out, target_lse, out, lse, query_start_loc[-1:])
    elif target_out is not out:
        out.copy_(target_out)
    return (out, lse) if return_lse else out


def _check_arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> torch.Size:
    check_tensor("query", query, (None, None, None), *KV_DTYPES)
    _, num_heads, head_size = query.shape
    check_tensor("key_cache", key_cache, (None, None, None, head_size), query.dtype, *FP8_DTYPES)
    check_supported("key_cache", key_cache)
    check_tensor("value_cache", value_cache, key_cache.shape, key_cache.dtype)
    num_kv_heads = key_cache.shape[2]
    if not 1 <= head_size <= MAX_HEAD_SIZE:
        raise ValueError(f"head_size is {head_size}, not 1 to {MAX_HEAD_SIZE}")
    if num_kv_heads < 1 or num_heads % num_kv_heads or not num_heads:
        raise ValueError(
            f"{num_heads} query heads can't be shared out over {num_kv_heads} KV heads"
        )
    if key_cache.shape[1] < 1:
        raise ValueError("block_size is 0")
    check_tensor("block_tables", block_tables, (None, None), torch.int32)
    num_seqs = block_tables.shape[0]
    check_tensor("seq_lens", seq_lens, (num_seqs,), torch.int32)
    check_tensor("query_start_loc", query_start_loc, (num_seqs + 1,), torch.int32)
    check_devices(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
    )
    return query.shape


def _check_options(
    scale: float,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    max_query_len: int | None,
    num_splits: int | None,
) -> None:
    check_positive("scale", scale)
    if softcap is not None:
        check_positive("softcap", softcap)
    if sliding_window is not None:
        check_integer("sliding_window", sliding_window, 1)
        if not causal:
            raise ValueError("sliding_window needs causal=True")
    if max_query_len is not None:
        check_integer("max_query_len", max_query_len, 0)
    if num_splits is not None:
        check_integer("num_splits", num_splits, 1)


def _dot_dtype(dtype: torch.dtype, interpreted: bool) -> tl.dtype:
    if dtype == torch.float16:
        return tl.float16
    # The interpreter would compute on the bit patterns of bfloat16.
    return tl.bfloat16 if dtype == torch.bfloat16 and not interpreted else tl.float32


def offline_cases() -> Iterator[OfflineCase]:
    """Decode and prefill in every cache dtype; as extra other head sizes, with all options."""
    for name, dtype in DTYPES.items():
        for config, query_len in (("decode", 1), ("prefill", 64)):
            yield OfflineCase(
                "paged_attention",
                name,
                lambda dtype=dtype, query_len=query_len: _example(dtype, query_len),
                config,
                tokens_argument="TILE_N",
            )
    options = {
        "softcap": 30.0,
        "sliding_window": 100,
        "alibi_slopes": torch.zeros(32),
        "sinks": torch.zeros(32),
        "return_lse": True,
    }
    for head_size in (64, 80, 96, 128, 192, 256, 576):
        for name in ("bf16", "fp32", "fp8e5m2"):
            for config, query_len in (("decode", 1), ("prefill", 64)):
                yield OfflineCase(
                    "paged_attention",
                    name,
                    lambda dtype=DTYPES[name], query_len=query_len, head_size=head_size: _example(
                        dtype, query_len, head_size=head_size, **options
                    ),
                    f"{config}-d{head_size}",
                    tokens_argument="TILE_N",
                    extra=True,
                    large=head_size >= 256 and name != "fp8e5m2",
                )


def _example(
    cache_dtype: torch.dtype,
    query_len: int,
    head_size: int = 128,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    block_size: int = 16,
    **options: object,
) -> None:
    dtype = torch.bfloat16 if cache_dtype in FP8_DTYPES else cache_dtype
    query = torch.zeros(query_len, num_heads, head_size, dtype=dtype)
    cache = torch.zeros(2, block_size, num_kv_heads, head_size, dtype=dtype).to(cache_dtype)
    paged_attention(
        query,
        cache,
        cache.clone(),
        torch.zeros(1, 4, dtype=torch.int32),
        torch.full((1,), query_len, dtype=torch.int32),
        torch.tensor([0, query_len], dtype=torch.int32),
        scale=head_size**-0.5,
        max_query_len=query_len,
        **options,
    )
