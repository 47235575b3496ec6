"""KVCache: the paged tensors of all layers, and the copies and swaps between their blocks.

Whatever the order in memory, a layer's keys (and values) are seen as

    [num_blocks, block_size, num_kv_heads, head_size]

which is what every kernel addresses, by strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from . import reference
from .copy_blocks import (
    CopyPlan,
    Pairs,
    StagedBlocks,
    check_distinct,
    check_pairs,
    copy_blocks_kernel,
    copy_within,
)
from .launch import is_interpreted

Layout = Literal["NHD", "HND"]

NO_PAIRS: tuple[tuple[int, int], ...] = ()


class KVCache:
    """The key and value blocks of every layer on one device, and of its swap space on the host.

    Args:
        num_layers, num_kv_heads, head_size: the model's shape.
        num_blocks, block_size: blocks on the device, and tokens in each.
        dtype: of keys and values; fp8 types too.
        device: where the blocks lie.
        layout: the order within a block: "NHD" is [block_size, heads, head_size], "HND" is
            [heads, block_size, head_size].
        interleaved: whether a block's keys and values lie side by side, [num_blocks, 2, ...]; else
            they are two tensors.
        num_host_blocks: blocks of swap space, in host memory, pinned if `device` is a GPU.
        value_head_size: of the values, if it isn't head_size; not with `interleaved`.
        use_kernels: whether blocks are moved by the Triton kernels or in plain torch; by default,
            by kernels where they can run.

    Attributes:
        key_caches, value_caches: a view a layer, [num_blocks, block_size, num_kv_heads, head_size].
        host_key_caches, host_value_caches: likewise, of num_host_blocks.

    Raises:
        ValueError: for a size below 1 (num_host_blocks: below 0) or an unknown layout.

    Example: `KVCache(2, 100, 16, 8, 128).key_caches[1][7, 0]` is the key of slot 112 in layer 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        *,
        layout: Layout = "NHD",
        interleaved: bool = False,
        num_host_blocks: int = 0,
        value_head_size: int | None = None,
        use_kernels: bool | None = None,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "value_head_size": head_size if value_head_size is None else value_head_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; expected at least 1")
        if num_host_blocks < 0:
            raise ValueError(f"num_host_blocks is {num_host_blocks}; expected at least 0")
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout is {layout!r}; expected 'NHD' or 'HND'")
        if interleaved and sizes["value_head_size"] != head_size:
            raise ValueError(
                f"value_head_size is {value_head_size} and head_size {head_size}: only caches of "
                "one size can be interleaved"
            )
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        device = torch.device(device)
        can_run = device.type != "cpu" or is_interpreted(copy_blocks_kernel)
        self._use_kernels = can_run if use_kernels is None else use_kernels
        host = {"device": "cpu", "pin_memory": device.type != "cpu"}
        head_sizes = (head_size, sizes["value_head_size"])
        self.key_caches: list[torch.Tensor] = []
        self.value_caches: list[torch.Tensor] = []
        self.host_key_caches: list[torch.Tensor] = []
        self.host_value_caches: list[torch.Tensor] = []
        for _ in range(num_layers):
            for count, where, keys, values in (
                (num_blocks, {"device": device}, self.key_caches, self.value_caches),
                (num_host_blocks, host, self.host_key_caches, self.host_value_caches),
            ):
                options = {"dtype": dtype, **where}
                shape = (count, block_size, num_kv_heads)
                key, value = _allocate(shape, head_sizes, layout, interleaved, options)
                keys.append(key)
                values.append(value)
        self._within = CopyPlan(self._caches, self._caches)
        self._to_host = CopyPlan(self._caches, self._host_caches)
        self._from_host = CopyPlan(self._host_caches, self._caches)

    @property
    def num_bytes(self) -> int:
        """The bytes of all layers' blocks on the device."""
        return sum(cache.nbytes for cache in (*self.key_caches, *self.value_caches))

    def apply(
        self, copies: Pairs = NO_PAIRS, swap_out: Pairs = NO_PAIRS, swap_in: Pairs = NO_PAIRS
    ) -> None:
        """Carry out what the block manager decided for one step, in all layers.

        The order is: both swaps, which read every block as it was before the step, then the copies,
        which read every block as it is after the swaps. So a block that was swapped in can be
        copied, and one that was swapped out can be the destination of anything. All work is queued
        on the current stream; host blocks may be read once that has been waited for.

        Args:
            copies: int64 [n, 2] of (source, destination), both on the device.
            swap_out: int64 [n, 2] of (device block, host block).
            swap_in: int64 [n, 2] of (host block, device block).

        Raises:
            ValueError: before anything moves, for ids out of range or a block that is the
                destination of two of the step's transfers.

        Example: `apply(copies=[(3, 9)], swap_in=[(0, 3)])` fills blocks 3 and 9 from host block 0.
        """
        on_device, on_host = self.num_blocks, self.num_host_blocks
        copies = check_pairs("copies", copies, on_device, on_device)
        swap_out = check_pairs("swap_out", swap_out, on_device, on_host)
        swap_in = check_pairs("swap_in", swap_in, on_host, on_device)
        written = np.concatenate([copies[:, 1], swap_in[:, 1]])
        check_distinct("destination of copies and swap_in", written)
        if not self._use_kernels:
            self._apply_reference(copies, swap_out, swap_in)
            return
        self._apply_swaps(swap_out, swap_in)
        copy_within(self._within, copies)

    @property
    def _caches(self) -> list[torch.Tensor]:
        return [*self.key_caches, *self.value_caches]

    @property
    def _host_caches(self) -> list[torch.Tensor]:
        return [*self.host_key_caches, *self.host_value_caches]

    def _apply_swaps(self, swap_out: np.ndarray, swap_in: np.ndarray) -> None:
        # A host block may leave and be taken in one step: it is read first, into a buffer.
        taken = np.isin(swap_in[:, 0], swap_out[:, 1])
        staged = None
        if taken.any():
            staged = StagedBlocks(self._host_caches, swap_in[taken, 0], self._within.device)
        self._to_host.run(swap_out)
        self._from_host.run(swap_in[~taken])
        if staged is not None:
            staged.copy_to(self._caches, swap_in[taken, 1])

    def _apply_reference(
        self, copies: np.ndarray, swap_out: np.ndarray, swap_in: np.ndarray
    ) -> None:
        """The same in plain torch, for a machine with neither a GPU nor the interpreter."""
        arriving = reference.gather_blocks(self._host_caches, swap_in[:, 0])
        reference.swap_blocks(self._caches, self._host_caches, swap_out)
        reference.scatter_blocks(arriving, self._caches, swap_in[:, 1])
        reference.copy_blocks(self.key_caches, self.value_caches, copies)


def _allocate(
    shape: tuple[int, int, int],  # number of blocks, block size, number of KV heads
    head_sizes: tuple[int, int],
    layout: Layout,
    interleaved: bool,
    options: dict[str, object],
) -> Sequence[torch.Tensor]:
    """Return one layer's keys and values as [num_blocks, block_size, num_kv_heads, head_size]."""
    num_blocks, *inner = shape
    if layout == "HND":
        inner.reverse()
    if interleaved:
        both = torch.zeros(num_blocks, 2, *inner, head_sizes[0], **options)
        pair = both.unbind(1)
    else:
        pair = [torch.zeros(num_blocks, *inner, size, **options) for size in head_sizes]
    return [cache.transpose(1, 2) if layout == "HND" else cache for cache in pair]
