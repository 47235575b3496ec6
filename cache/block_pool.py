"""BlockPool: the state of all blocks of one device, one row a block.

Which free block is handed out next: the one given back last, then ids never used, in ascending
order. Arrays are zeroed by the operating system on first touch, so a pool costs no time to build.
"""

import numpy as np

NO_BLOCK = -1


class BlockPool:
    """Arrays of `num_blocks` rows, meaningful for blocks that are in use or evictable.

    Attributes:
        token_ids: int32 [num_blocks, block_size]; the first num_tokens of a row are written.
        num_tokens: int32 [num_blocks].
        ref_count: int32 [num_blocks], 0 for free and evictable blocks.
        prev_block: int32 [num_blocks], the id before it in its sequence, NO_BLOCK for the first.
        depth: int32 [num_blocks], the index in its sequence.
        content_hash: int64 [num_blocks], of full blocks where prefixes are cached.
        parent_hash: int64 [num_blocks], the hash before it, likewise.
        cached: bool [num_blocks], whether PrefixIndex holds the block.
        computed: bool [num_blocks], whether its KV was written.
        in_prefill: bool [num_blocks], whether it filled with a prompt and is not computed yet.
        last_accessed: float64 [num_blocks], in the caller's unit of time.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.token_ids = np.zeros((num_blocks, block_size), dtype=np.int32)
        self.num_tokens = np.zeros(num_blocks, dtype=np.int32)
        self.ref_count = np.zeros(num_blocks, dtype=np.int32)
        self.prev_block = np.zeros(num_blocks, dtype=np.int32)
        self.depth = np.zeros(num_blocks, dtype=np.int32)
        self.content_hash = np.zeros(num_blocks, dtype=np.int64)
        self.parent_hash = np.zeros(num_blocks, dtype=np.int64)
        self.cached = np.zeros(num_blocks, dtype=bool)
        self.computed = np.zeros(num_blocks, dtype=bool)
        self.in_prefill = np.zeros(num_blocks, dtype=bool)
        self.last_accessed = np.zeros(num_blocks, dtype=np.float64)
        self.flat_token_ids = self.token_ids.ravel()
        self._recycled = np.empty(num_blocks, dtype=np.int32)
        self._num_recycled = 0
        self._next_fresh = 0

    @property
    def num_free(self) -> int:
        """Blocks that are neither in use nor evictable."""
        return self._num_recycled + self.num_blocks - self._next_fresh

    def take(self, count: int) -> np.ndarray:
        """Remove `count` <= num_free ids from the free ones, int32 [count]."""
        reused = min(count, self._num_recycled)
        top = self._num_recycled
        self._num_recycled = top - reused
        if reused == count:
            return self._recycled[top - reused : top][::-1].copy()
        fresh = np.arange(self._next_fresh, self._next_fresh + count - reused, dtype=np.int32)
        self._next_fresh += count - reused
        if not reused:
            return fresh
        return np.concatenate([self._recycled[top - reused : top][::-1], fresh])

    def give_back(self, block_ids: np.ndarray) -> None:
        """Make ids free; the last of them is handed out next."""
        end = self._num_recycled + len(block_ids)
        self._recycled[self._num_recycled : end] = block_ids
        self._num_recycled = end

    def forget_order(self, first_fresh: int) -> None:
        """Make all ids from `first_fresh` on free, as in a new pool."""
        self._num_recycled = 0
        self._next_fresh = first_fresh

    def free_ids(self) -> np.ndarray:
        """All free ids, int32, in no order that matters."""
        fresh = np.arange(self._next_fresh, self.num_blocks, dtype=np.int32)
        return np.concatenate([self._recycled[: self._num_recycled], fresh])

    def copy_rows(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Copy what a block holds, for a copy-on-write or a swap; the reference count stays."""
        self.token_ids[destinations] = self.token_ids[sources]
        self.num_tokens[destinations] = self.num_tokens[sources]
        self.prev_block[destinations] = self.prev_block[sources]
        self.depth[destinations] = self.depth[sources]
        self.last_accessed[destinations] = self.last_accessed[sources]
