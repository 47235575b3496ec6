"""Gather, scatter and swap of whole blocks.

    gather:   out[t][i] = cache[t][block_ids[i]]
    scatter:  cache[t][block_ids[i]] = blocks[t][i]
    swap:     destination[t][d] = source[t][s]  for each (s, d) of the block mapping

for every tensor t in one launch. Either side may lie in pinned host memory: the GPU reads and
writes it in place, so a swap of many small blocks is one launch and not a transfer each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .copy_blocks import (
    CopyPlan,
    Pairs,
    check_apart,
    check_blocks,
    check_distinct,
    check_pairs,
    check_range,
    host_ids,
    launch_device,
)
from .offline import DTYPES, OfflineCase

BlockIds = torch.Tensor | np.ndarray | Sequence[int]


def gather_blocks(
    caches: Sequence[torch.Tensor],
    block_ids: BlockIds,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Copy blocks out of each cache into contiguous memory, in the order of `block_ids`.

    Args:
        caches: tensors [num_blocks, block_size, num_kv_heads, head_size] of one shape and dtype.
        block_ids: int64 [n] on the CPU; an id may occur more than once.
        out: tensors [n, block_size, num_kv_heads, head_size], one a cache, that are written; on the
            caches' device or in pinned host memory. Made where the caches are if None.

    Returns:
        `out`. Pinned host memory holds the blocks once the current stream has got there.

    Raises:
        ValueError: before anything is copied, for ids outside [0, num_blocks) or tensors that don't
            fit each other or share memory.

    Example: `gather_blocks([k, v], [5, 2])` gives [k[[5, 2]], v[[5, 2]]].
    """
    cache = check_blocks("caches", caches)
    ids = _check_ids("block_ids", block_ids, cache.shape[0])
    if out is None:
        shape = (len(ids), *cache.shape[1:])
        out = [torch.empty(shape, dtype=cache.dtype, device=cache.device) for _ in caches]
    else:
        _check_match("out", out, "caches", caches, num_blocks=len(ids))
        check_apart("out", out, "caches", caches)
    CopyPlan(caches, out).run(np.stack([ids, np.arange(len(ids))], axis=1))
    return list(out)


def scatter_blocks(
    blocks: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    block_ids: BlockIds,
) -> None:
    """Copy contiguous blocks into each cache: what `gather_blocks` took out goes back.

    Args:
        blocks: tensors [n, block_size, num_kv_heads, head_size], on the caches' device or in pinned
            host memory, which must not change before the current stream has read it.
        caches: tensors [num_blocks, block_size, num_kv_heads, head_size]; written in place.
        block_ids: int64 [n] on the CPU, distinct.

    Raises:
        ValueError: before anything is copied, for ids outside [0, num_blocks), an id that occurs
            twice, or tensors that don't fit each other or share memory.

    Example: `scatter_blocks([b], [k], [5, 2])` sets k[5] = b[0] and k[2] = b[1].
    """
    cache = check_blocks("caches", caches)
    ids = _check_ids("block_ids", block_ids, cache.shape[0])
    check_distinct("block_ids", ids)
    _check_match("blocks", blocks, "caches", caches, num_blocks=len(ids))
    check_apart("blocks", blocks, "caches", caches)
    CopyPlan(blocks, caches).run(np.stack([np.arange(len(ids)), ids], axis=1))


def swap_blocks(
    sources: Sequence[torch.Tensor],
    destinations: Sequence[torch.Tensor],
    block_mapping: Pairs,
) -> None:
    """Copy blocks between two caches, such as a GPU's and one in pinned host memory.

    Args:
        sources: tensors [num_source_blocks, block_size, num_kv_heads, head_size].
        destinations: tensors [num_destination_blocks, block_size, num_kv_heads, head_size], other
            memory than the sources; written in place.
        block_mapping: int64 [num_pairs, 2] of (source, destination), on the CPU.

    Raises:
        ValueError: before anything is copied, for ids out of range, a destination that occurs
            twice, or tensors that don't fit each other or share memory.

    Example: `swap_blocks([gpu_k], [cpu_k], [(6, 0)])` sets cpu_k[0] = gpu_k[6].
    """
    num_sources = check_blocks("sources", sources).shape[0]
    num_destinations = check_blocks("destinations", destinations).shape[0]
    pairs = check_pairs("block_mapping", block_mapping, num_sources, num_destinations)
    _check_match("destinations", destinations, "sources", sources)
    check_apart("destinations", destinations, "sources", sources)
    CopyPlan(sources, destinations).run(pairs)


def _check_ids(name: str, block_ids: BlockIds, num_blocks: int) -> np.ndarray:
    ids = host_ids(name, block_ids)
    if ids.ndim != 1:
        raise ValueError(f"{name} has shape {list(ids.shape)}; expected [num_ids]")
    check_range(name, ids, num_blocks)
    return ids


def _check_match(
    name: str,
    tensors: Sequence[torch.Tensor],
    other_name: str,
    others: Sequence[torch.Tensor],
    num_blocks: int | None = None,
) -> None:
    """Raise ValueError unless `tensors` can be copied to or from `others` pair by pair."""
    if len(tensors) != len(others):
        raise ValueError(f"{name} holds {len(tensors)} tensors, {other_name} {len(others)}")
    tensor, other = check_blocks(name, tensors), others[0]
    if tensor.shape[1:] != other.shape[1:]:
        raise ValueError(
            f"{name} have blocks of shape {list(tensor.shape[1:])}, {other_name} "
            f"{list(other.shape[1:])}"
        )
    if num_blocks not in (None, tensor.shape[0]):
        raise ValueError(f"{name} have {tensor.shape[0]} blocks for {num_blocks} block ids")
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name} are {tensor.dtype}, {other_name} {other.dtype}")
    launch_device([*tensors, *others])


def offline_cases() -> Iterator[OfflineCase]:
    """Gather from the layouts a cache may have; scatter is the same kernel the other way."""
    for name, dtype in DTYPES.items():
        interleaved = torch.empty(4, 16, 2, 8, 128, dtype=dtype)
        caches = [interleaved[:, :, 0], interleaved[:, :, 1]]
        yield OfflineCase(
            "copy_blocks",
            name,
            lambda caches=caches: gather_blocks(caches, [2, 0, 3]),
            "gather-interleaved",
        )
