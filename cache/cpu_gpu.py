"""CpuGpuBlockAllocator: one pool a device, and the block tables over them."""

from collections.abc import Sequence as ListOf
from typing import Literal

import numpy as np

from .block_table import BlockTables, move_references
from .content_hash import ContentHasher, HashAlgorithm
from .evictor import EvictorChoice, check_policy
from .interfaces import Block, BlockAllocator, Device, as_count
from .naive import NaiveBlockAllocator
from .prefix_caching import PrefixCachingBlockAllocator

AllocatorType = Literal["naive", "prefix_caching"]


class CpuGpuBlockAllocator(BlockAllocator):
    """Sends each call to the allocator of its device. Built by `create`.

    Block ids are relative to their device.

    Attributes:
        tables: the `BlockTables` of all sequences.
    """

    @staticmethod
    def create(
        allocator_type: AllocatorType,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        *,
        evictor: EvictorChoice = "lru",
        hash_seed: int | None = None,
        hash_algorithm: HashAlgorithm = "mix64",
        reserve_null_block: bool = False,
        track_index_changes: bool = False,
        reuse_uncached_first: bool = True,
    ) -> "CpuGpuBlockAllocator":
        """Return an allocator with two pools of one kind.

        Args:
            allocator_type: "naive" or "prefix_caching".
            num_gpu_blocks, num_cpu_blocks: blocks in each pool.
            block_size: tokens a block.
            evictor, hash_seed, hash_algorithm: for prefix caching; see `make_evictor` and
                `ContentHasher`.
            reserve_null_block: keep GPU block 0 as the null block of a sliding window.
            track_index_changes: see `PrefixCachingBlockAllocator`; for the GPU.
            reuse_uncached_first: likewise, for both devices.

        Raises:
            ValueError: for an unknown type, evictor or algorithm, or a count out of range.
        """
        if not callable(evictor):
            check_policy(evictor)
        if allocator_type == "naive":
            return CpuGpuBlockAllocator(
                NaiveBlockAllocator(num_gpu_blocks, block_size, Device.GPU, reserve_null_block),
                NaiveBlockAllocator(num_cpu_blocks, block_size, Device.CPU),
            )
        if allocator_type != "prefix_caching":
            raise ValueError(
                f"allocator type is {allocator_type!r}; expected 'naive' or 'prefix_caching'"
            )
        if reserve_null_block:
            raise ValueError("prefix caching with a sliding window is not supported")
        block_size = as_count("block_size", block_size, 1)
        hasher = ContentHasher(block_size, hash_seed, hash_algorithm)
        return CpuGpuBlockAllocator(
            PrefixCachingBlockAllocator(
                num_gpu_blocks,
                block_size,
                Device.GPU,
                evictor,
                hasher,
                track_index_changes,
                reuse_uncached_first,
            ),
            PrefixCachingBlockAllocator(
                num_cpu_blocks,
                block_size,
                Device.CPU,
                evictor,
                hasher,
                reuse_uncached_first=reuse_uncached_first,
            ),
        )

    def __init__(self, gpu: NaiveBlockAllocator, cpu: NaiveBlockAllocator) -> None:
        self.block_size = gpu.block_size
        self._allocators = {Device.GPU: gpu, Device.CPU: cpu}
        self.tables = BlockTables([gpu, cpu], num_rows=16, width=64)

    def allocator(self, device: Device) -> NaiveBlockAllocator:
        """The allocator of one device. Raises ValueError for anything that isn't a device."""
        try:
            return self._allocators[device]
        except (KeyError, TypeError):
            raise ValueError(f"device is {device!r}; expected Device.GPU or Device.CPU") from None

    def root(self, extra_key: object) -> np.int64:
        """The hash before the first block of a sequence with this extra key; 0 without caching."""
        gpu = self._allocators[Device.GPU]
        if isinstance(gpu, PrefixCachingBlockAllocator):
            return gpu.hasher.root(extra_key)
        return np.int64(0)

    def allocate_mutable(
        self, prev_block: Block | None, device: Device = Device.GPU, extra_key: object = None
    ) -> Block:
        return self.allocator(device).allocate_mutable(prev_block, extra_key=extra_key)

    def allocate_immutable(
        self,
        prev_block: Block | None,
        token_ids: ListOf[int] | np.ndarray,
        device: Device = Device.GPU,
        extra_key: object = None,
    ) -> Block:
        return self.allocator(device).allocate_immutable(prev_block, token_ids, extra_key=extra_key)

    def free(self, block: Block) -> None:
        block._allocator.free(block)

    def fork(self, last_block: Block) -> list[Block]:
        return last_block._allocator.fork(last_block)

    def get_num_free_blocks(self, device: Device = Device.GPU) -> int:
        return self.allocator(device).num_free

    def get_num_total_blocks(self, device: Device = Device.GPU) -> int:
        return self.allocator(device).get_num_total_blocks()

    def get_num_full_blocks_touched(
        self, blocks: ListOf[Block], device: Device = Device.GPU
    ) -> int:
        return self.allocator(device).get_num_full_blocks_touched(blocks)

    def mark_blocks_as_accessed(
        self, block_ids: ListOf[int] | np.ndarray, now: float, device: Device = Device.GPU
    ) -> None:
        self.allocator(device).mark_blocks_as_accessed(block_ids, now)

    def mark_blocks_as_computed(
        self, block_ids: ListOf[int] | np.ndarray, device: Device = Device.GPU
    ) -> None:
        self.allocator(device).mark_blocks_as_computed(block_ids)

    def get_common_computed_block_ids(self, lists: ListOf[ListOf[int]]) -> list[int]:
        return self._allocators[Device.GPU].get_common_computed_block_ids(lists)

    def find_cached_prefix(
        self, token_ids: ListOf[int] | np.ndarray, extra_key: object = None
    ) -> np.ndarray:
        return self._allocators[Device.GPU].find_cached_prefix(token_ids, extra_key)

    def clear_copy_on_writes(self) -> np.ndarray:
        return self._allocators[Device.GPU].clear_copy_on_writes()

    def swap(self, blocks: ListOf[Block], src_device: Device, dst_device: Device) -> np.ndarray:
        """Move standalone blocks, in chain order, to the other device; their ids change.

        Forks of one block in the list move once.

        Returns:
            What to copy, (block on src_device, block on dst_device), int64 [n, 2].

        Raises:
            NoFreeBlocksError: with nothing changed.
            ValueError: if a block is not a live standalone block of src_device.
        """
        giver, taker = self.allocator(src_device), self.allocator(dst_device)
        if giver is taker:
            raise ValueError(f"source and destination are both {src_device!r}")
        if len({id(block) for block in blocks}) < len(blocks):
            raise ValueError("a block appears twice in one swap")
        for block in blocks:
            if block._allocator is not giver or block._read_only or block.block_id is None:
                raise ValueError(f"{block!r} is not a live standalone block on {src_device!r}")
        if not blocks:
            return np.zeros((0, 2), dtype=np.int64)
        ids = np.array([block.block_id for block in blocks], dtype=np.int32)
        unique, new_ids, needs_copy = move_references(giver, taker, ids)
        new_id_of = dict(zip(unique.tolist(), new_ids.tolist(), strict=True))
        for block in blocks:
            block._allocator, block._block_id = taker, new_id_of[block.block_id]
        return np.stack([unique[needs_copy], new_ids[needs_copy]], axis=1).astype(np.int64)

    def get_prefix_cache_hit_rate(self, device: Device = Device.GPU) -> float:
        return self.allocator(device).get_prefix_cache_hit_rate()

    def reset_prefix_cache(self, device: Device = Device.GPU) -> bool:
        return self.allocator(device).reset_prefix_cache()

    def check_integrity(self) -> None:
        """As in `BlockAllocator`, for blocks that are owned by block tables alone."""
        self.tables.check_integrity()
