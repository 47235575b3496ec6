"""torch's flex_attention over the paged cache: blocks that are read by index, without a gather."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kernels.launch import cdiv

from ...results import AbsentError
from ..operations.attention import Attention
from .implementation import Call, Implementation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

QUERY_TILE = 128
"""Queries that share a list of blocks; a multiple of the tiles of all of torch's kernels."""
LEAST_BLOCK_SIZE = 16
LEAST_HEAD_SIZE = 16


def attention(op: Attention) -> Call:
    """Compiled for a GPU; on a CPU as it is, which ignores the block lists and only masks.

    The cache is one batch entry of all slots, which every sequence of the batch looks into.
    """
    config = op.config
    if config.block_size % LEAST_BLOCK_SIZE:
        raise AbsentError(
            f"flex_attention needs block sizes divisible by {LEAST_BLOCK_SIZE}, the fewest keys "
            f"that its kernels take at once, not {config.block_size}"
        )
    if config.head_size < LEAST_HEAD_SIZE:
        raise AbsentError(
            f"flex_attention needs a head size of {LEAST_HEAD_SIZE} at least, "
            f"not {config.head_size}"
        )
    from torch.nn.attention.flex_attention import flex_attention

    # Left from other shapes, these would make it compile for any shape, and give up in the end.
    torch.compiler.reset()
    if op.device.type == "cuda":
        flex_attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    batch, heads, head_size = config.batch_size, config.num_heads, config.head_size
    query = op.query.view(batch, op.query_len, heads, head_size).transpose(1, 2)
    slots = (1, -1, config.num_kv_heads, head_size)
    key = op.key_cache.view(slots).transpose(1, 2)
    value = op.value_cache.view(slots).transpose(1, 2)
    mask = make_block_mask(op)
    options = kernel_options(op)

    def call() -> torch.Tensor:
        # With gradients it would write the log-sum-exp, too.
        with torch.no_grad():
            out = flex_attention(
                query,
                key,
                value,
                block_mask=mask,
                scale=op.scale,
                enable_gqa=True,
                kernel_options=options,
            )
        return out.transpose(1, 2).reshape(op.query.shape)

    return call


def make_block_mask(op: Attention) -> BlockMask:
    """For each tile of queries the physical blocks that it sees, wholly or in part."""
    from torch.nn.attention.flex_attention import BlockMask

    partial, full = _visible_blocks(op)
    if op.query_len == 1:
        # The decode kernel shares the work out by the length of the list of partly seen blocks;
        # beside another list, by that of the cache.
        partial, full = partial | full, None
    num_partial, partial_blocks = _listed(op, partial)
    num_full, full_blocks = (None, None) if full is None else _listed(op, full)
    return BlockMask.from_kv_blocks(
        num_partial,
        partial_blocks,
        num_full,
        full_blocks,
        BLOCK_SIZE=(QUERY_TILE, op.config.block_size),
        mask_mod=_mask_mod(op),
        seq_lengths=(op.query_len, len(op.key_cache) * op.config.block_size),
        compute_q_blocks=False,
    )


def _visible_blocks(op: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """(seen in part, seen whole): bool [query tiles, logical blocks], alike for all sequences."""
    block_size, context_len = op.config.block_size, op.seq_len - op.query_len
    window = op.config.sliding_window or op.seq_len
    tiles = torch.arange(cdiv(op.query_len, QUERY_TILE), device=op.device)[:, None]
    first_query = context_len + tiles * QUERY_TILE
    last_query = (first_query + QUERY_TILE - 1).clamp(max=op.seq_len - 1)
    first_key = torch.arange(op.block_tables.shape[1], device=op.device)[None] * block_size
    last_key = first_key + block_size - 1
    seen = (first_key <= last_query) & (last_key > first_query - window)
    full = (last_key <= first_query) & (first_key > last_query - window)
    return seen & ~full, full


def _listed(op: Attention, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 ([batch_size, 1, tiles] counts, [batch_size, 1, tiles, blocks] physical blocks)."""
    order = (~chosen).int().argsort(dim=1, stable=True)
    counts = chosen.sum(1, dtype=torch.int32).expand(op.config.batch_size, 1, -1)
    return counts.contiguous(), op.block_tables[:, order][:, None].contiguous()


def _mask_mod(op: Attention) -> Callable[..., torch.Tensor]:
    """Which slots of the cache a query sees, by the position that a slot has in its sequence."""
    block_size, context_len = op.config.block_size, op.seq_len - op.query_len
    window = op.config.sliding_window or op.seq_len
    width = op.block_tables.shape[1]
    shape = (op.config.batch_size, len(op.key_cache))
    # Where a block lies in each sequence; -1 where it does not.
    logical = torch.full(shape, -1, dtype=torch.int32, device=op.device)
    places = torch.arange(width, dtype=torch.int32, device=op.device)
    logical.scatter_(1, op.block_tables.long(), places.expand(op.config.batch_size, -1))

    def visible(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        block = logical[batch, slot // block_size]
        key = block * block_size + slot % block_size
        position = context_len + query
        return (block >= 0) & (key <= position) & (key > position - window)

    return visible


def kernel_options(op: Attention) -> dict[str, object]:
    """A tile of keys that divides a block, and a kernel that takes both."""
    block_size = op.config.block_size
    options: dict[str, object] = {}
    if block_size % 128:
        options["BLOCK_N"] = math.gcd(block_size, 64)
    # By default the decode kernel takes any short prefill, also where its tile can't hold it.
    if op.query_len > 1 or (block_size > 64 and block_size % 64):
        options["BACKEND"] = "TRITON"
    return options


IMPLEMENTATION = Implementation("flex_attention", {"attention": attention})
