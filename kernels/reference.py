"""Every operation in plain torch and einops: the definition that the kernels are tested against.

The functions take the arguments of the kernels' launchers and run on any device and dtype: on
float64 inputs they give the exact answer, on half precision an honest eager one. They are also what
to call where there is neither a GPU nor the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from einops import einsum, rearrange, repeat

Scale = float | torch.Tensor | None


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_size]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    block_tables: torch.Tensor,  # [num_seqs, max_blocks]
    seq_lens: torch.Tensor,  # [num_seqs]
    query_start_loc: torch.Tensor,  # [num_seqs + 1]
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,  # [num_heads]
    sinks: torch.Tensor | None = None,  # [num_heads]
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's newest tokens over its cached keys and values.

    The query rows of sequence i are query_start_loc[i] to query_start_loc[i + 1], and they are the
    last positions of its seq_lens[i] tokens. The score of a key is

        score = scale * k_scale * dot(query, key)
        score = softcap * tanh(score / softcap)             if softcap
        score = score + slope * (key position - query position)   if alibi_slopes
        score = -inf                                        if the key isn't visible

    and a sink is one more score per head, of a key without a value. A row that sees no key gives
    zeros and a log-sum-exp of -inf.
    """
    num_tokens, num_heads = query.shape[:2]
    block_size, num_kv_heads = key_cache.shape[1:3]
    out = torch.empty_like(query) if out is None else out
    # Scores and sums in at least float32; the two products in the inputs' own precision.
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = torch.full((num_tokens, num_heads), float("-inf"), dtype=wide, device=query.device)
    per_head = "h -> h 1 1"
    for seq, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_start_loc[seq : seq + 2].tolist()
        blocks = block_tables[seq, : -(-seq_len // block_size)].long()
        keys, values = (
            repeat(
                _dequantized(_taken(cache, blocks), cache_scale, query.dtype),
                "blocks slot h d -> (blocks slot) (h group) d",
                group=num_heads // num_kv_heads,
            )[:seq_len]
            for cache, cache_scale in ((key_cache, k_scale), (value_cache, v_scale))
        )
        scores = einsum(query[start:end], keys, "q h d, k h d -> h q k").to(wide) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_position = torch.arange(seq_len - (end - start), seq_len, device=query.device)[
            :, None
        ]
        key_position = torch.arange(seq_len, device=query.device)[None, :]
        if alibi_slopes is not None:
            slopes = rearrange(alibi_slopes.to(wide), per_head)
            scores = scores + slopes * (key_position - query_position)
        visible = torch.ones_like(key_position - query_position, dtype=torch.bool)
        if causal:
            visible &= key_position <= query_position
        if sliding_window is not None:
            visible &= key_position > query_position - sliding_window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = rearrange(sinks.to(wide), per_head).expand(-1, end - start, 1)
            sink = sink.masked_fill(~visible.any(1, keepdim=True), float("-inf"))
            scores = torch.cat([scores, sink], dim=-1)
        total = torch.logsumexp(scores, dim=-1, keepdim=True)  # [num_heads, query_len, 1]
        weights = torch.exp(scores - total.masked_fill(total == float("-inf"), 0.0))
        weights = weights[..., :seq_len].to(query.dtype)
        out[start:end] = einsum(weights, values, "h q k, k h d -> q h d").to(out.dtype)
        lse[start:end] = rearrange(total, "h q 1 -> q h")
    return (out, lse) if return_lse else out


def merge_states(
    outs: torch.Tensor,  # [num_states, num_tokens, num_heads, head_size]
    lses: torch.Tensor,  # [num_states, num_tokens, num_heads]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the union of disjoint key sets, from the attention over each set.

    out = sum_i exp(lse_i - lse) * out_i  with  lse = log(sum_i exp(lse_i)).  A state whose lse is
    -inf has no keys and adds nothing, whatever its `outs` hold.
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == float("-inf"), 0.0))[..., None]
    terms = torch.where(weights > 0, outs.to(weights.dtype) * weights, 0.0)
    return terms.sum(0).to(outs.dtype), lse


def write_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    slot_mapping: torch.Tensor,  # [num_tokens], slot = block_id * block_size + offset
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Write the new tokens' keys and values into their slots, in place; slot -1 writes nothing."""
    block_size = key_cache.shape[1]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block, offset = slots // block_size, slots % block_size
    key_cache[block, offset] = quantized(key[kept], k_scale, key_cache.dtype)
    value_cache[block, offset] = quantized(value[kept], v_scale, value_cache.dtype)


def quantized(
    tensor: torch.Tensor,  # [..., num_kv_heads, head_size]
    scale: Scale,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`tensor / scale` in `dtype`; what lies outside its range becomes its largest value."""
    if scale is None and tensor.dtype == dtype:
        return tensor
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if scale is not None:
        wide = wide / _per_kv_head(scale, wide)
    limit = torch.finfo(dtype).max
    return wide.clamp(-limit, limit).to(dtype)


def _dequantized(cache: torch.Tensor, scale: Scale, dtype: torch.dtype) -> torch.Tensor:
    if cache.dtype == dtype and scale is None:
        return cache
    wide = cache.to(torch.promote_types(dtype, torch.float32))
    return (wide if scale is None else wide * _per_kv_head(scale, wide)).to(dtype)


def _per_kv_head(scale: Scale, like: torch.Tensor) -> torch.Tensor:
    scale = torch.as_tensor(scale, dtype=like.dtype, device=like.device)
    return scale[:, None] if scale.numel() > 1 else scale


# --------------------------------------------------------------------------------------------------
# Block moving and prefix hashes
# --------------------------------------------------------------------------------------------------

Pairs = torch.Tensor | np.ndarray | Sequence[tuple[int, int]]


def copy_blocks(
    key_caches: Sequence[torch.Tensor],  # [num_blocks, block_size, num_kv_heads, head_size] each
    value_caches: Sequence[torch.Tensor],
    block_mapping: Pairs,  # [num_pairs, 2] of (source, destination)
) -> None:
    """Copy blocks within every cache, in place; all sources are read before anything is written."""
    for cache in (*key_caches, *value_caches):
        swap_blocks([cache], [cache], block_mapping)


def swap_blocks(
    sources: Sequence[torch.Tensor],  # [num_source_blocks, block_size, num_kv_heads, head_size]
    destinations: Sequence[torch.Tensor],  # [num_destination_blocks, ...]
    block_mapping: Pairs,  # [num_pairs, 2] of (source, destination)
) -> None:
    """Copy blocks from each source tensor to the destination tensor beside it, in place."""
    pairs = torch.as_tensor(block_mapping, dtype=torch.long).reshape(-1, 2)
    for source, destination in zip(sources, destinations, strict=True):
        blocks = _as_integers(source)[pairs[:, 0].to(source.device)]
        _as_integers(destination)[pairs[:, 1].to(destination.device)] = blocks.to(
            destination.device
        )


def gather_blocks(
    caches: Sequence[torch.Tensor],  # [num_blocks, block_size, num_kv_heads, head_size]
    block_ids: torch.Tensor | Sequence[int],  # [n]
    out: Sequence[torch.Tensor] | None = None,  # [n, block_size, num_kv_heads, head_size]
) -> list[torch.Tensor]:
    """Copy blocks out of each cache into contiguous memory."""
    ids = torch.as_tensor(block_ids, dtype=torch.long)
    if out is None:
        out = [cache.new_empty((len(ids), *cache.shape[1:])) for cache in caches]
    swap_blocks(caches, out, torch.stack([ids, torch.arange(len(ids))], dim=1))
    return list(out)


def scatter_blocks(
    blocks: Sequence[torch.Tensor],  # [n, block_size, num_kv_heads, head_size]
    caches: Sequence[torch.Tensor],  # [num_blocks, block_size, num_kv_heads, head_size]
    block_ids: torch.Tensor | Sequence[int],  # [n], distinct
) -> None:
    """Copy contiguous blocks into each cache, in place."""
    ids = torch.as_tensor(block_ids, dtype=torch.long)
    swap_blocks(blocks, caches, torch.stack([torch.arange(len(ids)), ids], dim=1))


def _taken(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """cache[blocks], also of a dtype that can't be indexed everywhere."""
    return _as_integers(cache)[blocks].view(cache.dtype)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: every dtype can be indexed, and NaN payloads survive."""
    return tensor.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def hash_blocks(
    token_ids: torch.Tensor,  # int32 [num_seqs, max_seq_len]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    roots: torch.Tensor,  # int64 [num_seqs]
    hash_keys: torch.Tensor,  # int64 [2 * num_words + 1]: k, r, p
    block_size: int,
    out: torch.Tensor | None = None,  # int64 [num_seqs, max_blocks]
) -> torch.Tensor:
    """The content hash of every full block, and 0 past a sequence's last one.

    h[i] = h[i-1] + mix((i + 1) * p + sum over j of fold(word[i, j], k[j]) * r[j]) modulo 2^64, with
    fold and mix as in `kernels.prefix_hash`, whose signed twin int64 arithmetic is.
    """
    num_seqs, max_seq_len = token_ids.shape
    num_blocks = max_seq_len // block_size
    if out is None:
        out = torch.empty(num_seqs, num_blocks, dtype=torch.int64, device=token_ids.device)
    blocks = token_ids[:, : num_blocks * block_size].long() & 0xFFFFFFFF
    blocks = blocks.view(num_seqs, num_blocks, block_size)
    low, high = blocks[..., ::2], torch.zeros_like(blocks[..., ::2])
    high[..., : block_size // 2] = blocks[..., 1::2]
    num_words = low.shape[-1]
    word_keys, multipliers = hash_keys[:num_words], hash_keys[num_words:-1]
    x = _xor_shift((low | high << 32) ^ word_keys, 32)
    x = _xor_shift(x * _signed(0xD6E8FEB86659FD93), 32)
    positions = torch.arange(1, num_blocks + 1, device=token_ids.device)
    y = (x * multipliers).sum(-1) + positions * hash_keys[-1]
    y = _xor_shift(y, 32) * _signed(0xBF58476D1CE4E5B9)
    y = _xor_shift(_xor_shift(y, 29) * _signed(0x94D049BB133111EB), 32)
    is_full = positions <= (seq_lens // block_size)[:, None]
    out.zero_()
    out[:, :num_blocks] = (roots[:, None] + y.cumsum(1)).masked_fill(~is_full, 0)
    return out


def match_prefix(
    token_ids: torch.Tensor,  # int32 [num_seqs, max_seq_len]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    roots: torch.Tensor,  # int64 [num_seqs]
    hash_keys: torch.Tensor,  # int64 [2 * num_words + 1]
    index_keys: torch.Tensor,  # int64 [num_buckets, 8], 0 where free
    index_block_ids: torch.Tensor,  # int32 [num_buckets, 8]
    pool_token_ids: torch.Tensor,  # int32 [num_blocks, block_size]
    computed: torch.Tensor,  # bool or uint8 [num_blocks]
    *,
    block_tables: torch.Tensor | None = None,  # int32 [num_seqs, max_blocks]
    matched_lens: torch.Tensor | None = None,  # int32 [num_seqs]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The longest run, from each prompt's start, of blocks that are cached, equal and computed.

    At least one token is left out of it. Past the run a block-table row is -1.
    """
    num_seqs, max_seq_len = token_ids.shape
    block_size = pool_token_ids.shape[1]
    if block_tables is None:
        block_tables = seq_lens.new_empty(num_seqs, max(0, max_seq_len - 1) // block_size)
    matched_lens = torch.empty_like(seq_lens) if matched_lens is None else matched_lens
    block_tables.fill_(-1)
    cached = dict(
        zip(index_keys.flatten().tolist(), index_block_ids.flatten().tolist(), strict=True)
    )
    cached.pop(0, None)
    hashes = hash_blocks(token_ids, seq_lens, roots, hash_keys, block_size).tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        run = 0
        while run < min(max(0, seq_len - 1) // block_size, block_tables.shape[1]):
            tokens = token_ids[seq, run * block_size : (run + 1) * block_size]
            block_id = cached.get(hashes[seq][run], -1)
            if block_id < 0 or not computed[block_id]:
                break
            if not torch.equal(pool_token_ids[block_id], tokens):
                break
            block_tables[seq, run] = block_id
            run += 1
        matched_lens[seq] = run * block_size
    return block_tables, matched_lens


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^ (x >> bits) with a logical shift."""
    return x ^ (x >> bits & (1 << 64 - bits) - 1)


def _signed(constant: int) -> int:
    """The int64 with the bits of an unsigned constant."""
    return constant - (1 << 64) if constant >> 63 else constant
