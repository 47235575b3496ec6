"""This project's kernels, as the block manager's arrays reach them."""

import functools
from contextlib import AbstractContextManager, nullcontext

import torch

from kernels.copy_blocks import CopyPlan
from kernels.launch import Target, cdiv, override_attention_tile, record_launches
from kernels.merge_states import merge_states
from kernels.paged_attention import paged_attention
from kernels.prefix_hash import hash_blocks, match_prefix, prefix_hash_gather
from kernels.write_kv import write_kv

from ..config import AttentionConfig, TileConfig
from ..operations.attention import Attention, lengths
from ..operations.block_moves import BlockMove
from ..operations.merge_states import MergeStates
from ..operations.operation import cache_torch_dtype, torch_dtype
from ..operations.prefix_hash import HashBlocks, MatchPrefix, PrefixHashGather
from ..operations.write_kv import WriteKV
from .implementation import Call, Implementation


def attention(op: Attention) -> Call:
    """With the tile of the configuration, if it names one."""

    def call() -> object:
        with _tile(op.config.tile):
            return paged_attention(
                op.query,
                op.key_cache,
                op.value_cache,
                op.block_tables,
                op.seq_lens,
                op.query_start_loc,
                scale=op.scale,
                sliding_window=op.config.sliding_window,
                out=op.out,
                max_query_len=op.query_len,
                num_splits=op.config.num_splits,
            )

    return call


def _tile(tile: TileConfig) -> AbstractContextManager:
    if tile.m is None:
        return nullcontext()
    return override_attention_tile((tile.m, tile.n, tile.num_warps, tile.num_stages))


def launched_splits(config: AttentionConfig, target: Target) -> int:
    """Into how many parts the keys are split on a target, from a launch that is not made."""
    seq_len, query_len = lengths(config)
    blocks_each = cdiv(seq_len, config.block_size)
    empty = functools.partial(torch.empty, device="meta")
    heads = (config.num_kv_heads, config.head_size)
    cache = empty(
        config.batch_size * blocks_each,
        config.block_size,
        *heads,
        dtype=cache_torch_dtype(config.cache_dtype, config.dtype),
    )
    query_shape = (config.batch_size * query_len, config.num_heads, config.head_size)
    with _tile(config.tile), record_launches(target) as launches:
        paged_attention(
            empty(query_shape, dtype=torch_dtype(config.dtype)),
            cache,
            cache,
            empty(config.batch_size, blocks_each, dtype=torch.int32),
            empty(config.batch_size, dtype=torch.int32),
            empty(config.batch_size + 1, dtype=torch.int32),
            scale=1.0,
            sliding_window=config.sliding_window,
            max_query_len=query_len,
            num_splits=config.num_splits,
        )
    return launches[0].grid[2]


def merge(op: MergeStates) -> Call:
    return lambda: merge_states(op.outs, op.lses, out=op.out, lse=op.lse)


def write(op: WriteKV) -> Call:
    return lambda: write_kv(
        op.key,
        op.value,
        op.key_cache,
        op.value_cache,
        op.slot_mapping,
        k_scale=op.k_scale,
        v_scale=op.v_scale,
    )


def move(op: BlockMove) -> Call:
    """One launch for all layers; the mapping is on the device already."""
    plan = CopyPlan(op.sources, op.destinations)
    return lambda: plan.run(op.pairs)


def hashes(op: HashBlocks) -> Call:
    prompts = (op.token_ids, op.seq_lens, op.roots, op.hash_keys)
    return lambda: hash_blocks(*prompts, op.config.block_size, op.out)


def match(op: MatchPrefix) -> Call:
    index = op.index
    return lambda: match_prefix(
        *(op.token_ids, op.seq_lens, op.roots, op.hash_keys),
        *(index.keys, index.block_ids, index.token_ids, index.computed),
        block_tables=op.block_tables,
        matched_lens=op.matched_lens,
    )


def match_and_gather(op: PrefixHashGather) -> Call:
    index = op.index
    return lambda: prefix_hash_gather(
        *(op.token_ids, op.seq_lens, op.roots, op.hash_keys),
        *(index.keys, index.block_ids, index.token_ids, index.computed),
        op.caches,
        block_tables=op.block_tables,
        matched_lens=op.matched_lens,
        out=op.gathered,
    )


IMPLEMENTATION = Implementation(
    "prefixlab",
    {
        "attention": attention,
        "merge_states": merge,
        "write_kv": write,
        "copy_blocks": move,
        "gather_blocks": move,
        "swap_blocks": move,
        "hash_blocks": hashes,
        "match_prefix": match,
        "prefix_hash_gather": match_and_gather,
    },
)
