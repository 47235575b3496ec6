"""Prefix hashes on the device: hash prompts, match them against the prefix index, gather the hits.

The content hash of block i of a sequence, all arithmetic modulo 2^64, is

    h[-1] = root
    h[i]  = h[i-1] + mix((i + 1) * p + sum over j of fold(word[i, j], k[j]) * r[j])

with word[i, j] the j-th pair of the block's tokens as a little-endian 64-bit word and

    fold(w, k) = xs32(xs32(w ^ k) * FOLD)              xsN(x) = x ^ (x >> N)
    mix(y)     = xs32(xs29(xs32(y) * MIX_1) * MIX_2)

bit-equal to what the block manager computes on the host. The index is its open-addressing table:
buckets of 8 entries, a hash's home being its top bits, the next bucket only after a full one. A
hash is only a candidate; a block is a hit if its stored tokens equal the prompt's and its KV is
computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from .copy_blocks import (
    CopyPlan,
    check_apart,
    check_blocks,
    check_distinct,
    check_range,
    to_device,
)
from .launch import (
    cdiv,
    check_devices,
    check_tensor,
    hash_tiles,
    launch,
    next_power_of_2,
    target_of,
)
from .offline import OfflineCase

FOLD = tl.constexpr(0xD6E8FEB86659FD93)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)

BUCKET_SIZE = tl.constexpr(8)
# The key of a free entry. A block whose content hash is 0 (one in 2^64) is never indexed.
EMPTY = tl.constexpr(0)

MAX_BLOCK_SIZE = 4096


@triton.jit
def _load_words(
    row,  # int32 pointer(s), to the first token of each block: [TILE_BLOCKS, 1]
    valid,  # [TILE_BLOCKS, 1]
    BLOCK_SIZE: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Each block's even and odd tokens, int32 [TILE_BLOCKS, TILE_WORDS], 0 past its end."""
    even = 2 * tl.arange(0, TILE_WORDS)[None, :]  # [1, TILE_WORDS]
    low = tl.load(row + even, mask=valid & (even < BLOCK_SIZE), other=0)
    high = tl.load(row + even + 1, mask=valid & (even + 1 < BLOCK_SIZE), other=0)
    return low, high


@triton.jit
def _digest(
    low,  # int32 [TILE_BLOCKS, TILE_WORDS]
    high,  # int32 [TILE_BLOCKS, TILE_WORDS]
    block,  # int32 [TILE_BLOCKS], the blocks' positions in their chain
    hash_keys,  # int64 [2 * num_words + 1]: k, r, p
    BLOCK_SIZE: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """What each block adds to the chain, uint64 [TILE_BLOCKS]."""
    NUM_WORDS: tl.constexpr = (BLOCK_SIZE + 1) // 2
    word = tl.arange(0, TILE_WORDS)
    inside = word < NUM_WORDS
    # A multiplier of 0 takes the padding words out of the sum.
    k = tl.load(hash_keys + word, mask=inside, other=0).to(tl.uint64, bitcast=True)
    r = tl.load(hash_keys + NUM_WORDS + word, mask=inside, other=0).to(tl.uint64, bitcast=True)
    p = tl.load(hash_keys + 2 * NUM_WORDS).to(tl.uint64, bitcast=True)
    x = low.to(tl.uint32, bitcast=True).to(tl.uint64)  # [TILE_BLOCKS, TILE_WORDS]
    x |= high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    x ^= k[None, :]
    x ^= x >> 32
    x *= FOLD
    x ^= x >> 32
    y = tl.sum(x * r[None, :], axis=1)  # [TILE_BLOCKS]
    y += (block + 1).to(tl.uint64) * p
    y ^= y >> 32
    y *= MIX_1
    y ^= y >> 29
    y *= MIX_2
    return y ^ (y >> 32)


@triton.jit
def _probe(
    hashes,  # uint64 [TILE_BLOCKS]
    pending,  # bool [TILE_BLOCKS], which to look up
    index_keys,  # int64 [num_buckets, 8]
    index_block_ids,  # int32 [num_buckets, 8]
    num_buckets,
    shift,
):
    """The block id of each hash, int32 [TILE_BLOCKS], or -1."""
    entry = tl.arange(0, BUCKET_SIZE)[None, :]  # [1, 8]
    wanted = hashes.to(tl.int64, bitcast=True)
    bucket = (hashes >> shift).to(tl.int64) & (num_buckets - 1)
    pending = pending & (wanted != EMPTY)
    block_ids = tl.full(hashes.shape, -1, tl.int32)
    probes = num_buckets
    while (probes > 0) & (tl.max(pending.to(tl.int32), axis=0) > 0):
        slot = bucket[:, None] * BUCKET_SIZE + entry  # [TILE_BLOCKS, 8]
        keys = tl.load(index_keys + slot, mask=pending[:, None], other=EMPTY)
        is_match = pending[:, None] & (keys == wanted[:, None])
        match = tl.max(tl.where(is_match, entry, -1), axis=1)  # [TILE_BLOCKS]
        found = match >= 0
        found_ids = tl.load(index_block_ids + bucket * BUCKET_SIZE + match, mask=found, other=-1)
        block_ids = tl.where(found, found_ids, block_ids)
        is_full = tl.min((keys != EMPTY).to(tl.int32), axis=1) > 0
        pending = pending & is_full & (match < 0)
        bucket = (bucket + 1) & (num_buckets - 1)
        probes -= 1
    return block_ids


@triton.jit
def _run_length(holds, TILE_BLOCKS: tl.constexpr):
    """How many lanes from the first one on hold without a gap."""
    return tl.min(tl.where(holds, TILE_BLOCKS, tl.arange(0, TILE_BLOCKS)), axis=0)


# Prompts and results may be slices of larger tensors: their alignment must not compile anew.
@triton.jit(
    do_not_specialize=["stride_token_seq", "stride_hash_seq", "max_seq_len", "max_blocks"],
    do_not_specialize_on_alignment=["token_ids", "seq_lens", "roots", "hashes"],
)
def hash_blocks_kernel(
    token_ids,  # int32 [num_seqs, max_seq_len]
    seq_lens,  # int32 [num_seqs]
    roots,  # int64 [num_seqs]
    hash_keys,  # int64 [2 * num_words + 1]
    hashes,  # int64 [num_seqs, max_blocks], written
    stride_token_seq,
    stride_hash_seq,
    max_seq_len,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    num_full = tl.minimum(tl.load(seq_lens + seq), max_seq_len) // BLOCK_SIZE
    before = tl.load(roots + seq).to(tl.uint64, bitcast=True)
    tokens = token_ids + seq * stride_token_seq
    start = num_full * 0
    while start < max_blocks:
        block = start + tl.arange(0, TILE_BLOCKS)  # [TILE_BLOCKS]
        is_full = block < num_full
        row = (tokens + block * BLOCK_SIZE)[:, None]
        low, high = _load_words(row, is_full[:, None], BLOCK_SIZE, TILE_WORDS)
        digest = _digest(low, high, block, hash_keys, BLOCK_SIZE, TILE_WORDS)
        chain = (before + tl.cumsum(digest, axis=0)).to(tl.int64, bitcast=True)
        out = tl.where(is_full, chain, EMPTY)
        tl.store(hashes + seq * stride_hash_seq + block, out, mask=block < max_blocks)
        before += tl.sum(digest, axis=0)
        start += TILE_BLOCKS


@triton.jit(
    do_not_specialize=[
        "stride_token_seq",
        "stride_pool_block",
        "stride_table_seq",
        "max_seq_len",
        "max_blocks",
        "num_blocks",
        "num_buckets",
        "shift",
    ],
    do_not_specialize_on_alignment=[
        "token_ids",
        "seq_lens",
        "roots",
        "block_tables",
        "matched_lens",
    ],
)
def match_prefix_kernel(
    token_ids,  # int32 [num_seqs, max_seq_len]
    seq_lens,  # int32 [num_seqs]
    roots,  # int64 [num_seqs]
    hash_keys,  # int64 [2 * num_words + 1]
    index_keys,  # int64 [num_buckets, 8]
    index_block_ids,  # int32 [num_buckets, 8]
    pool_token_ids,  # int32 [num_blocks, block_size]
    computed,  # uint8 [num_blocks]
    block_tables,  # int32 [num_seqs, max_blocks], written
    matched_lens,  # int32 [num_seqs], written
    stride_token_seq,
    stride_pool_block,
    stride_table_seq,
    max_seq_len,
    max_blocks,
    num_blocks,
    num_buckets,
    shift,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE_BLOCKS)
    seq_len = tl.minimum(tl.load(seq_lens + seq), max_seq_len)
    # The last token is always left to compute.
    limit = tl.minimum(tl.maximum(seq_len - 1, 0) // BLOCK_SIZE, max_blocks)
    before = tl.load(roots + seq).to(tl.uint64, bitcast=True)
    tokens = token_ids + seq * stride_token_seq
    table = block_tables + seq * stride_table_seq
    matched = limit * 0
    start = limit * 0
    while start < limit:
        block = start + lane  # [TILE_BLOCKS]
        wanted = block < limit
        row = (tokens + block * BLOCK_SIZE)[:, None]
        low, high = _load_words(row, wanted[:, None], BLOCK_SIZE, TILE_WORDS)
        digest = _digest(low, high, block, hash_keys, BLOCK_SIZE, TILE_WORDS)
        hashes = before + tl.cumsum(digest, axis=0)  # [TILE_BLOCKS]
        found = _probe(hashes, wanted, index_keys, index_block_ids, num_buckets, shift)
        # Each check looks only at the lanes that the one before has left.
        run = _run_length((found >= 0) & (found < num_blocks), TILE_BLOCKS)
        is_computed = tl.load(computed + found, mask=lane < run, other=0) != 0
        run = _run_length(is_computed, TILE_BLOCKS)
        pool_row = (pool_token_ids + found.to(tl.int64) * stride_pool_block)[:, None]
        stored = (lane < run)[:, None]
        pool_low, pool_high = _load_words(pool_row, stored, BLOCK_SIZE, TILE_WORDS)
        differs = (low != pool_low) | (high != pool_high)  # [TILE_BLOCKS, TILE_WORDS]
        equal = tl.max(differs.to(tl.int32), axis=1) == 0
        run = _run_length((lane < run) & equal, TILE_BLOCKS)
        tl.store(table + block, tl.where(lane < run, found, -1), mask=block < max_blocks)
        matched += run
        before += tl.sum(digest, axis=0)
        start += TILE_BLOCKS
        limit = tl.where(run == TILE_BLOCKS, limit, 0)
    tl.store(matched_lens + seq, matched * BLOCK_SIZE)
    while start < max_blocks:
        block = start + lane
        tl.store(table + block, tl.full([TILE_BLOCKS], -1, tl.int32), mask=block < max_blocks)
        start += TILE_BLOCKS


@triton.jit(do_not_specialize=["stride_patch", "stride_pool_block"])
def patch_index_kernel(
    # Each row: slot, key (low and high half), block id or -1, computed, tokens.
    patches,  # int32 [num_patches, 5 + block_size]
    index_keys,  # int64 [num_buckets, 8], written
    index_block_ids,  # int32 [num_buckets, 8], written
    pool_token_ids,  # int32 [num_blocks, block_size], written
    computed,  # uint8 [num_blocks], written
    stride_patch,
    stride_pool_block,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    patch = patches + tl.program_id(0).to(tl.int64) * stride_patch
    slot = tl.load(patch)
    low = tl.load(patch + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(patch + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    block_id = tl.load(patch + 3)
    tl.store(index_keys + slot, (low | (high << 32)).to(tl.int64, bitcast=True))
    tl.store(index_block_ids + slot, block_id)
    if block_id >= 0:
        tl.store(computed + block_id, tl.load(patch + 4).to(tl.uint8))
        token = tl.arange(0, TILE_TOKENS)
        mask = token < BLOCK_SIZE
        row = pool_token_ids + block_id.to(tl.int64) * stride_pool_block
        tl.store(row + token, tl.load(patch + 5 + token, mask=mask), mask=mask)


class PrefixMatch(NamedTuple):
    """What of each prompt is cached and computed."""

    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks], -1 after the last matched block
    matched_lens: torch.Tensor  # int32 [num_seqs], in tokens: a multiple of the block size


class GatheredPrefix(NamedTuple):
    """A match and the matched blocks' contents."""

    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    matched_lens: torch.Tensor  # int32 [num_seqs]
    gathered: list[torch.Tensor]  # a cache: [num_seqs, max_blocks * block_size, heads, head_size]


def make_hash_keys(
    word_keys: np.ndarray,  # uint64 [num_words]
    word_multipliers: np.ndarray,  # uint64 [num_words]
    position_multiplier: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Return k, r and p of a content hash in one tensor, int64 [2 * num_words + 1].

    Raises:
        ValueError: unless there are as many keys as multipliers, all of them integers of 64 bits.

    Example: `make_hash_keys(h.word_keys, h.word_multipliers, h.position_multiplier, "cuda")` for
    the host's ContentHasher h, whose algorithm has to be mix64.
    """
    num_words = (len(word_keys),)
    parts = [
        _integers("word_keys", word_keys, num_words, np.uint64),
        _integers("word_multipliers", word_multipliers, num_words, np.uint64),
        _integers("position_multiplier", [position_multiplier], (1,), np.uint64),
    ]
    keys = np.concatenate(parts)
    return to_device(keys.view(np.int64), torch.device(device))


def hash_blocks(
    token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    roots: torch.Tensor,
    hash_keys: torch.Tensor,
    block_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hash every full block of a batch of sequences.

    Args:
        token_ids: int32 [num_seqs, max_seq_len]; row i holds seq_lens[i] tokens, the rest isn't
            read. Rows may be strided.
        seq_lens: int32 [num_seqs], 0 to max_seq_len.
        roots: int64 [num_seqs], the hash before each first block: the host's `root(extra_key)`.
        hash_keys: int64 [2 * num_words + 1] from `make_hash_keys`, for this block size.
        block_size: tokens a block, 1 to 4096.
        out: int64 [num_seqs, at least max_seq_len // block_size], written; made if None.

    Returns:
        `out`: the content hashes, 0 past a sequence's last full block.

    Raises:
        ValueError: for another shape, dtype, device or block size.

    Example: at block size 4, sequences of 9 and 3 tokens give [[h0, h1], [0, 0]].
    """
    num_seqs, max_seq_len = _check_prompts(token_ids, seq_lens, roots, hash_keys, block_size)
    width = max_seq_len // block_size
    if out is None:
        out = torch.empty(num_seqs, width, dtype=torch.int64, device=token_ids.device)
    check_tensor("out", out, (num_seqs, None), torch.int64)
    if out.shape[1] < width:
        raise ValueError(f"out has {out.shape[1]} columns for {width} blocks a sequence")
    check_devices(token_ids=token_ids, out=out)
    tiles = hash_tiles(target_of(token_ids.device), block_size)
    launch(
        hash_blocks_kernel,
        (num_seqs,),
        token_ids,
        seq_lens,
        roots,
        hash_keys,
        out,
        token_ids.stride(0),
        out.stride(0),
        max_seq_len,
        out.shape[1],
        BLOCK_SIZE=block_size,
        TILE_BLOCKS=tiles.tile_blocks,
        TILE_WORDS=tiles.tile_words,
        **tiles.options,
    )
    return out


def match_prefix(
    token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    roots: torch.Tensor,
    hash_keys: torch.Tensor,
    index_keys: torch.Tensor,
    index_block_ids: torch.Tensor,
    pool_token_ids: torch.Tensor,
    computed: torch.Tensor,
    *,
    block_tables: torch.Tensor | None = None,
    matched_lens: torch.Tensor | None = None,
) -> PrefixMatch:
    """Find each prompt's longest cached prefix: hash, probe, compare, cut, in one launch.

    A prefix ends before the first block that is not in the index, holds other tokens or is not
    computed, and at least one token before the prompt does. A program walks its prompt in tiles and
    stops after the tile with the first miss; nothing waits for the device.

    Args:
        token_ids: int32 [num_seqs, max_seq_len]; row i holds seq_lens[i] tokens, the rest isn't
            read. Rows may be strided.
        seq_lens: int32 [num_seqs], 0 to max_seq_len.
        roots: int64 [num_seqs], the hash before each first block: the host's `root(extra_key)`.
        hash_keys: int64 [2 * num_words + 1] from `make_hash_keys`.
        index_keys: int64 [num_buckets, 8], the index's keys; num_buckets is a power of two.
        index_block_ids: int32 [num_buckets, 8].
        pool_token_ids: int32 [num_blocks, block_size], what each block holds.
        computed: bool or uint8 [num_blocks], whether a block's KV has been written.
        block_tables: int32 [num_seqs, max_blocks], written whole; max_blocks also bounds the match.
            Made for (max_seq_len - 1) // block_size blocks if None.
        matched_lens: int32 [num_seqs], written; made if None.

    Returns:
        The two outputs. Past the matched blocks a block-table row is -1.

    Raises:
        ValueError: for tensors whose shape, dtype or device don't fit.

    Example: at block size 4, with [1..8] cached and computed in blocks 3 and 7, the prompt [1..8]
    gives block_tables [[3]] and matched_lens [4], and [1..9] gives [[3, 7]] and [8].
    """
    check_tensor("pool_token_ids", pool_token_ids, (None, None), torch.int32)
    num_blocks, block_size = pool_token_ids.shape
    num_seqs, max_seq_len = _check_prompts(token_ids, seq_lens, roots, hash_keys, block_size)
    num_buckets = _check_index(index_keys, index_block_ids)
    check_tensor("computed", computed, (num_blocks,), torch.bool, torch.uint8)
    device = token_ids.device
    if block_tables is None:
        width = max(0, max_seq_len - 1) // block_size
        block_tables = torch.empty(num_seqs, width, dtype=torch.int32, device=device)
    if matched_lens is None:
        matched_lens = torch.empty(num_seqs, dtype=torch.int32, device=device)
    check_tensor("block_tables", block_tables, (num_seqs, None), torch.int32)
    check_tensor("matched_lens", matched_lens, (num_seqs,), torch.int32)
    check_devices(
        token_ids=token_ids,
        index_keys=index_keys,
        index_block_ids=index_block_ids,
        pool_token_ids=pool_token_ids,
        computed=computed,
        block_tables=block_tables,
        matched_lens=matched_lens,
    )
    tiles = hash_tiles(target_of(token_ids.device), block_size)
    launch(
        match_prefix_kernel,
        (num_seqs,),
        token_ids,
        seq_lens,
        roots,
        hash_keys,
        index_keys,
        index_block_ids,
        pool_token_ids,
        computed.view(torch.uint8),
        block_tables,
        matched_lens,
        token_ids.stride(0),
        pool_token_ids.stride(0),
        block_tables.stride(0),
        max_seq_len,
        block_tables.shape[1],
        num_blocks,
        num_buckets,
        index_shift(num_buckets),
        BLOCK_SIZE=block_size,
        TILE_BLOCKS=tiles.tile_blocks,
        TILE_WORDS=tiles.tile_words,
        **tiles.options,
    )
    return PrefixMatch(block_tables, matched_lens)


def prefix_hash_gather(
    token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    roots: torch.Tensor,
    hash_keys: torch.Tensor,
    index_keys: torch.Tensor,
    index_block_ids: torch.Tensor,
    pool_token_ids: torch.Tensor,
    computed: torch.Tensor,
    caches: Sequence[torch.Tensor],
    *,
    block_tables: torch.Tensor | None = None,
    matched_lens: torch.Tensor | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> GatheredPrefix:
    """Match as `match_prefix` does, then gather the matched blocks of every cache.

    Two launches, and nothing waits for the device: the second one reads the first one's tables.

    Args:
        caches: tensors [num_blocks, block_size, num_kv_heads, head_size] of one shape and dtype,
            such as the keys and values of all layers.
        out: tensors [num_seqs, max_blocks * block_size, num_kv_heads, head_size], contiguous, one a
            cache, that share no memory with the caches; made if None. Row i is written up to
            matched_lens[i], not beyond.
        the others: as for `match_prefix`.

    Raises:
        ValueError: for tensors whose shape, dtype or device don't fit.

    Example: with a prompt matched to blocks [3, 7], gathered[0][0, :8] is blocks 3 and 7 of
    caches[0], one after the other.
    """
    num_seqs = token_ids.shape[0] if token_ids.ndim else 0
    num_blocks, block_size = check_blocks("caches", caches).shape[:2]
    check_tensor("pool_token_ids", pool_token_ids, (num_blocks, block_size), torch.int32)
    check_devices(token_ids=token_ids, caches=caches[0])
    if block_tables is not None:
        check_tensor("block_tables", block_tables, (num_seqs, None), torch.int32)
        width = block_tables.shape[1]
    else:
        check_tensor("token_ids", token_ids, (None, None), torch.int32)
        width = max(0, token_ids.shape[1] - 1) // block_size
    shape = (num_seqs, width * block_size, *caches[0].shape[2:])
    is_new = out is None
    if is_new:
        out = [caches[0].new_empty(shape) for _ in caches]
    if len(out) != len(caches):
        raise ValueError(f"out holds {len(out)} tensors, caches {len(caches)}")
    for index, tensor in enumerate(out):
        check_tensor(f"out[{index}]", tensor, shape, caches[0].dtype)
        check_devices(caches=caches[0], out=tensor)
        if not tensor.is_contiguous():
            raise ValueError(f"out[{index}] has strides {tensor.stride()}; it must be contiguous")
    if not is_new:
        check_apart("out", out, "caches", caches)
    tables, lens = match_prefix(
        token_ids,
        seq_lens,
        roots,
        hash_keys,
        index_keys,
        index_block_ids,
        pool_token_ids,
        computed,
        block_tables=block_tables,
        matched_lens=matched_lens,
    )
    # Every table entry is a pair; those of -1 copy nothing.
    sources = tables.reshape(-1).long()
    rows = torch.arange(num_seqs * width, device=sources.device)
    blocks = [tensor.view(num_seqs * width, block_size, *shape[2:]) for tensor in out]
    CopyPlan(caches, blocks).run(torch.stack([sources, rows], dim=1))
    return GatheredPrefix(tables, lens, list(out))


class DevicePrefixIndex:
    """The host's prefix index in device memory, with what a candidate is checked against.

    It follows the host's by small updates: `apply_changes` for the entries that changed, and
    `set_computed` for blocks whose KV was written. Updates are ordered with matches by the stream.

    Attributes:
        keys: int64 [num_buckets, 8]; 0 where free.
        block_ids: int32 [num_buckets, 8].
        token_ids: int32 [num_blocks, block_size], meaningful for indexed blocks.
        computed: uint8 [num_blocks].
    """

    def __init__(
        self,
        num_buckets: int,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cuda",
    ) -> None:
        if num_buckets < 1 or num_buckets & (num_buckets - 1):
            raise ValueError(f"num_buckets is {num_buckets}; expected a power of two")
        if num_blocks < 1 or not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"num_blocks is {num_blocks}, block_size {block_size}")
        self.num_blocks = num_blocks
        entries = (num_buckets, BUCKET_SIZE.value)
        self.keys = torch.zeros(entries, dtype=torch.int64, device=device)
        self.block_ids = torch.zeros(entries, dtype=torch.int32, device=device)
        self.token_ids = torch.zeros(num_blocks, block_size, dtype=torch.int32, device=device)
        self.computed = torch.zeros(num_blocks, dtype=torch.uint8, device=device)

    def apply_changes(
        self,
        slots: np.ndarray,
        keys: np.ndarray,
        block_ids: np.ndarray,
        token_ids: np.ndarray,
        computed: np.ndarray,
    ) -> None:
        """Overwrite entries, and the tokens and flags of the blocks that they name, in one launch.

        Args:
            slots: int64 [n], bucket * 8 + entry, distinct.
            keys: int64 [n], 0 for an entry that became free: the block beside it is left alone.
            block_ids: int32 [n].
            token_ids: int32 [n, block_size], the tokens of block_ids[i] in row i.
            computed: bool [n], whether the KV of block_ids[i] has been written.

        Raises:
            ValueError: before anything is written, for values out of range or of another kind, a
                slot or id that occurs twice, or other shapes.

        Example, with the host's index and pool:
            slots, keys, ids = index.drain_changes()
            device_index.apply_changes(slots, keys, ids, pool.token_ids[ids], pool.computed[ids])
        """
        n, block_size = len(slots), self.token_ids.shape[1]
        slots = _integers("slots", slots, (n,), np.int64)
        keys = _integers("keys", keys, (n,), np.int64)
        block_ids = _integers("block_ids", block_ids, (n,), np.int64)
        token_ids = _integers("token_ids", token_ids, (n, block_size), np.int32)
        computed = _flags("computed", computed, (n,))
        check_range("slot", slots, self.keys.numel())
        check_distinct("slot", slots)
        is_free = keys == EMPTY.value
        named = np.where(is_free, -1, block_ids)
        check_range("block id", named[~is_free], self.num_blocks)
        check_distinct("block id", named[~is_free])
        patches = np.empty((n, 5 + block_size), dtype=np.int32)
        patches[:, 0] = slots
        patches[:, 1:3] = keys.astype("<i8").reshape(n, 1).view("<i4")
        patches[:, 3] = named
        patches[:, 4] = computed
        patches[:, 5:] = token_ids
        launch(
            patch_index_kernel,
            (n,),
            to_device(patches, self.keys.device),
            self.keys,
            self.block_ids,
            self.token_ids,
            self.computed,
            patches.shape[1],
            self.token_ids.stride(0),
            BLOCK_SIZE=block_size,
            TILE_TOKENS=next_power_of_2(block_size),
            num_warps=1 if block_size <= 128 else 4,
        )

    def set_computed(self, block_ids: np.ndarray, computed: bool = True) -> None:
        """Mark blocks, int64 [n], as computed, or not.

        Raises:
            ValueError: for ids that are out of range or no integers, such as one flag a block.
        """
        ids = _integers("block_ids", block_ids, np.shape(block_ids), np.int64)
        check_range("block id", ids, self.num_blocks)
        flag = _flags("computed", computed, ())
        self.computed[to_device(ids, self.computed.device)] = int(flag)

    def match(
        self,
        token_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        roots: torch.Tensor,
        hash_keys: torch.Tensor,
    ) -> PrefixMatch:
        """Call `match_prefix` on this index."""
        return match_prefix(
            token_ids,
            seq_lens,
            roots,
            hash_keys,
            self.keys,
            self.block_ids,
            self.token_ids,
            self.computed,
        )


def index_shift(num_buckets: int) -> int:
    """How far right a hash is shifted to give its home bucket; one bucket is masked to 0 anyway."""
    return 64 - max(1, num_buckets.bit_length() - 1)


def _integers(
    name: str, values: np.ndarray | Sequence[int], shape: tuple[int, ...], dtype: type
) -> np.ndarray:
    """Return `values` as `dtype`. Raises ValueError for another shape, or one that doesn't fit."""
    array = np.asarray(values)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}")
    if not array.size:
        return array.astype(dtype)
    if array.dtype.kind not in "iu":
        # Integers that no dtype holds may be floats or objects by now.
        if not isinstance(values, np.ndarray):
            array = np.asarray(values, dtype=object)
        for value in array.flat:
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ValueError(f"{name} holds {value!r}; expected integers")
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    outside = (array < least) | (array > most)
    if outside.any():
        value = array.flat[outside.argmax()]
        raise ValueError(f"{name} holds {value}, which is outside [{least}, {most}]")
    return array.astype(dtype)


def _flags(
    name: str, values: np.ndarray | Sequence[bool] | bool, shape: tuple[int, ...]
) -> np.ndarray:
    """Return `values` as bool. Raises ValueError for another shape, or one that is no flag."""
    array = np.asarray(values)
    if array.dtype.kind != "b":
        array = _integers(name, values, shape, np.int64)
        wrong = (array != 0) & (array != 1)
        if wrong.any():
            raise ValueError(f"{name} holds {array.flat[wrong.argmax()]}; expected a flag")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}")
    return array.astype(bool)


def _check_prompts(
    token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    roots: torch.Tensor,
    hash_keys: torch.Tensor,
    block_size: int,
) -> tuple[int, int]:
    """Return (num_seqs, max_seq_len). Raises ValueError for tensors that don't fit."""
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size is {block_size}; expected 1 to {MAX_BLOCK_SIZE}")
    check_tensor("token_ids", token_ids, (None, None), torch.int32)
    num_seqs, max_seq_len = token_ids.shape
    check_tensor("seq_lens", seq_lens, (num_seqs,), torch.int32)
    check_tensor("roots", roots, (num_seqs,), torch.int64)
    check_tensor("hash_keys", hash_keys, (2 * cdiv(block_size, 2) + 1,), torch.int64)
    check_devices(token_ids=token_ids, seq_lens=seq_lens, roots=roots, hash_keys=hash_keys)
    return num_seqs, max_seq_len


def _check_index(index_keys: torch.Tensor, index_block_ids: torch.Tensor) -> int:
    """Return num_buckets. Raises ValueError unless it is a power of two and both arrays agree."""
    check_tensor("index_keys", index_keys, (None, BUCKET_SIZE.value), torch.int64)
    num_buckets = index_keys.shape[0]
    if num_buckets < 1 or num_buckets & (num_buckets - 1):
        raise ValueError(f"index_keys has {num_buckets} buckets; expected a power of two")
    check_tensor("index_block_ids", index_block_ids, tuple(index_keys.shape), torch.int32)
    for name, tensor in (("index_keys", index_keys), ("index_block_ids", index_block_ids)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
    return num_buckets


def offline_cases() -> Iterator[OfflineCase]:
    """Every kernel at block sizes of one word, odd words, a usual number, and many."""

    def run(block_size: int, kernel: str) -> None:
        num_words = cdiv(block_size, 2)
        token_ids = torch.empty(3, 4 * block_size, dtype=torch.int32)
        prompts = (
            token_ids,
            torch.empty(3, dtype=torch.int32),
            torch.empty(3, dtype=torch.int64),
            torch.empty(2 * num_words + 1, dtype=torch.int64),
        )
        index = DevicePrefixIndex(16, 5, block_size, "cpu")
        if kernel == "hash_blocks":
            hash_blocks(*prompts, block_size)
        elif kernel == "match_prefix":
            index.match(*prompts)
        else:
            one = np.ones(1, dtype=np.int64)
            index.apply_changes(one, one, one, np.ones((1, block_size), dtype=np.int32), one)

    for block_size in (1, 12, 16, 544, MAX_BLOCK_SIZE):
        for kernel in ("hash_blocks", "match_prefix", "patch_index"):
            yield OfflineCase(kernel, "int32", partial(run, block_size, kernel), f"bs{block_size}")
