"""Block allocation without caching: every block is private until it is forked.

`NaiveBlockAllocator` serves one device. Its methods on arrays of block ids are what block tables
are made of; `PrefixCachingBlockAllocator` overrides those where cached content matters.
"""

from collections.abc import Sequence as ListOf
from typing import NamedTuple

import numpy as np

from .block_pool import NO_BLOCK, BlockPool
from .copy_on_write import CopyOnWriteTracker
from .interfaces import (
    Block,
    BlockAllocator,
    BlockId,
    Device,
    NoFreeBlocksError,
    as_count,
    as_token_ids,
)
from .stats import CacheStats

_MOVED_COLUMNS = (
    "token_ids",
    "num_tokens",
    "depth",
    "computed",
    "in_prefill",
    "last_accessed",
)
_NO_IDS = np.zeros(0, dtype=np.int32)
_NO_HASHES = np.zeros(0, dtype=np.int64)


class SequencePlan(NamedTuple):
    """What allocating a sequence would take. Valid until the allocator changes."""

    root: np.int64
    """The hash before the first block."""
    hashes: np.ndarray
    """int64 [num_full_blocks]; empty without caching."""
    found: np.ndarray
    """int32 [num_full_blocks], the cached block or -1; empty without caching."""
    num_prefix_hits: int
    """Hits before the first miss."""
    num_late_hits: int
    """Hits behind a miss: the block before them was evicted."""
    num_new: int
    """Blocks that need a new id."""
    num_revived: int
    """Hits on evictable blocks; they go off the free count too."""
    num_computed_blocks: int
    """Blocks from the start that need not be computed; at least one token is left out."""

    @property
    def num_taken(self) -> int:
        """What the free count goes down by."""
        return self.num_new + self.num_revived


class Occupancy(NamedTuple):
    """Blocks of a pool by state; the null block is none of them."""

    num_in_use: int
    """Referenced by a block table or a standalone block."""
    num_evictable: int
    """Unreferenced, with content that can be hit."""
    num_free: int
    """Neither."""


class NaiveBlock(Block):
    """A block of a `NaiveBlockAllocator`, or a read-only view on a block that a table owns."""

    __slots__ = ("_allocator", "_block_id", "_extra_key", "_prev", "_read_only")

    def __init__(
        self,
        allocator: "NaiveBlockAllocator",
        block_id: int,
        prev_block: Block | None = None,
        extra_key: object = None,
        read_only: bool = False,
    ) -> None:
        self._allocator = allocator
        self._block_id: int | None = int(block_id)
        self._prev = prev_block
        self._extra_key = extra_key
        self._read_only = read_only

    def append_token_ids(self, token_ids: ListOf[int] | np.ndarray) -> None:
        tokens = as_token_ids(token_ids)
        if self._read_only:
            raise ValueError(
                f"block {self.block_id} belongs to a block table; append through the table"
            )
        self._allocator.check_previous(self.prev_block)
        if self.prev_block is not None and not self.prev_block.is_full:
            raise ValueError(f"the block before {self!r} is not full")
        if len(tokens) > self.num_empty_slots:
            raise ValueError(
                f"{len(tokens)} tokens don't fit the {self.num_empty_slots} empty slots of "
                f"block {self.block_id}"
            )
        if len(tokens):
            self._block_id = self._allocator._append_to_block(self, tokens)

    def _live_id(self) -> int:
        if self._block_id is None:
            raise ValueError("the block was freed")
        return self._block_id

    @property
    def block_id(self) -> BlockId | None:
        return self._block_id

    @property
    def token_ids(self) -> np.ndarray:
        block_id = self._live_id()
        pool = self._allocator.pool
        return pool.token_ids[block_id, : pool.num_tokens[block_id]].copy()

    @property
    def num_tokens_total(self) -> int:
        block_id = self._live_id()
        pool = self._allocator.pool
        return int(pool.depth[block_id]) * pool.block_size + int(pool.num_tokens[block_id])

    @property
    def num_empty_slots(self) -> int:
        pool = self._allocator.pool
        return pool.block_size - int(pool.num_tokens[self._live_id()])

    @property
    def is_full(self) -> bool:
        return self.num_empty_slots == 0

    @property
    def prev_block(self) -> Block | None:
        if self._prev is not None or not self._read_only:
            return self._prev
        prev_id = int(self._allocator.pool.prev_block[self._live_id()])
        return None if prev_id == NO_BLOCK else self._allocator.view(prev_id)

    @property
    def computed(self) -> bool:
        return bool(self._allocator.pool.computed[self._live_id()])

    @property
    def last_accessed(self) -> float:
        return float(self._allocator.pool.last_accessed[self._live_id()])

    @property
    def content_hash(self) -> int | None:
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(block_id={self._block_id}, {self._allocator.device.name})"


class NaiveBlockAllocator(BlockAllocator):
    """Allocates the blocks of one device.

    Args:
        num_blocks: blocks in the pool, at least 0.
        block_size: tokens a block, at least 1.
        device: the device that the ids are relative to.
        reserve_null_block: keep one block (id 0) that stands for blocks outside a sliding window.
            Nobody writes it and it is no part of the free or total count.

    Raises:
        ValueError: for a count that is not an integer in its range.
    """

    block_type: type[NaiveBlock] = NaiveBlock

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        device: Device = Device.GPU,
        reserve_null_block: bool = False,
    ) -> None:
        self.block_size = as_count("block_size", block_size, 1)
        num_blocks = as_count("num_blocks", num_blocks, int(reserve_null_block))
        if num_blocks >= 2**31:
            raise ValueError(f"num_blocks is {num_blocks}; block ids are int32")
        self.pool = BlockPool(num_blocks, self.block_size)
        self.device = device
        self.stats = CacheStats()
        self.copy_on_writes = CopyOnWriteTracker()
        self.null_block_id: int | None = None
        if reserve_null_block:
            self.null_block_id = int(self.pool.take(1)[0])
            self.pool.ref_count[self.null_block_id] = 1

    # -- one block at a time

    def allocate_mutable(
        self,
        prev_block: Block | None,
        device: Device | None = None,
        extra_key: object = None,
    ) -> Block:
        self._check_device(device)
        self.check_previous(prev_block)
        block_id = self.take_new(1)
        self._link_to(prev_block, block_id)
        return self.block_type(self, block_id[0], prev_block, extra_key)

    def allocate_immutable(
        self,
        prev_block: Block | None,
        token_ids: ListOf[int] | np.ndarray,
        device: Device | None = None,
        extra_key: object = None,
    ) -> Block:
        self._check_device(device)
        tokens = self._full_block_tokens(token_ids)
        self.check_previous(prev_block, must_be_full=True)
        block_id = self._take_full(prev_block, tokens)
        return self.block_type(self, block_id[0], prev_block, extra_key)

    def _take_full(self, prev_block: Block | None, tokens: np.ndarray) -> np.ndarray:
        """Take a block and fill it, int32 [1]. Raises NoFreeBlocksError with nothing changed."""
        block_id = self.take_new(1)
        self._link_to(prev_block, block_id)
        self.pool.token_ids[block_id] = tokens
        self.pool.num_tokens[block_id] = self.block_size
        return block_id

    def free(self, block: Block) -> None:
        if block._read_only:
            raise ValueError(f"{block!r} belongs to a block table; free the table")
        if block._allocator is not self:
            raise ValueError(f"{block!r} belongs to another allocator")
        if block.block_id is None:
            raise ValueError("the block was freed before")
        self.release(np.array([block.block_id], dtype=np.int32))
        block._block_id = None

    def fork(self, last_block: Block) -> list[Block]:
        chain = []
        block: Block | None = last_block
        while block is not None:
            if block._read_only:
                raise ValueError(f"{block!r} belongs to a block table; fork the table")
            if block.block_id is None:
                raise ValueError("a block of the chain was freed")
            chain.append(block)
            block = block.prev_block
        chain.reverse()
        self.add_references(np.array([block.block_id for block in chain], dtype=np.int32))
        forks: list[Block] = []
        for block in chain:
            previous = forks[-1] if forks else None
            forks.append(self.block_type(self, block.block_id, previous, block._extra_key))
        return forks

    def view(self, block_id: int, prev_block: Block | None = None) -> Block:
        """Return a read-only view on a block that a table owns."""
        return self.block_type(self, block_id, prev_block, read_only=True)

    def _append_to_block(self, block: NaiveBlock, tokens: np.ndarray) -> int:
        """Write tokens that fit and return the id that the block has afterwards."""
        block_ids = np.array([block._live_id()], dtype=np.int32)
        needs_copy = self.copies_needed(block_ids)
        if needs_copy.any():
            block_ids = self.copy_on_write(block_ids, self.take_new(1))
        pool = self.pool
        block_id = int(block_ids[0])
        start = int(pool.num_tokens[block_id])
        pool.token_ids[block_id, start : start + len(tokens)] = tokens
        pool.num_tokens[block_id] = start + len(tokens)
        if start + len(tokens) == self.block_size:
            block_ids = self.fill(block_ids, self._parent_hash(block))
        return int(block_ids[0])

    def check_previous(self, prev_block: Block | None, must_be_full: bool = False) -> None:
        """Raise ValueError unless a block of this allocator can follow `prev_block`."""
        if prev_block is None:
            return
        if prev_block._allocator is not self:
            raise ValueError(f"{prev_block!r} belongs to another allocator")
        prev_block._live_id()
        if must_be_full and not prev_block.is_full:
            raise ValueError(f"{prev_block!r} is not full; a full block cannot follow it")

    def _parent_hash(self, block: NaiveBlock) -> np.ndarray:
        return _NO_HASHES

    def _link_to(self, prev_block: Block | None, block_id: np.ndarray) -> None:
        if prev_block is None:
            self.pool.prev_block[block_id], self.pool.depth[block_id] = NO_BLOCK, 0
        else:
            self.pool.prev_block[block_id] = prev_block._live_id()
            self.pool.depth[block_id] = self.pool.depth[prev_block._live_id()] + 1

    def _full_block_tokens(self, token_ids: ListOf[int] | np.ndarray) -> np.ndarray:
        tokens = as_token_ids(token_ids)
        if len(tokens) != self.block_size:
            raise ValueError(
                f"{len(tokens)} tokens given; a full block has block_size = {self.block_size}"
            )
        return tokens

    # -- whole sequences

    def plan(
        self,
        tokens: np.ndarray,
        num_slots: int,
        root: np.int64 | None = None,
        hashes: np.ndarray | None = None,
    ) -> SequencePlan:
        """Say what `allocate_sequence` would take; changes nothing.

        Args:
            tokens: int32 [num_tokens], checked.
            num_slots: num_tokens plus lookahead slots.
            root, hashes: the extra key's root and the full blocks' hashes, if known; not used
                without caching.
        """
        return SequencePlan(
            np.int64(0), _NO_HASHES, _NO_IDS, 0, 0, self.num_blocks_for(num_slots), 0, 0
        )

    def allocate_sequence(self, tokens: np.ndarray, plan: SequencePlan) -> np.ndarray:
        """Take the blocks of a new sequence, int32 [num_blocks], or raise NoFreeBlocksError.

        `plan` is what `plan` said for the same tokens, with no change in between.
        """
        block_ids = self._take(plan.num_new)
        self._write_new(block_ids, tokens, 0, NO_BLOCK)
        return block_ids

    def _write_new(
        self, block_ids: np.ndarray, tokens: np.ndarray, first_depth: int, prev_block: int
    ) -> None:
        """Set every column of new blocks that hold consecutive tokens of one sequence."""
        count = len(block_ids)
        if not count:
            return
        pool = self.pool
        # Consecutive ids are written through a slice, which is several times faster.
        rows: np.ndarray | slice = block_ids
        first = int(block_ids[0])
        if int(block_ids[-1]) - first == count - 1 and (block_ids[1:] > block_ids[:-1]).all():
            rows = slice(first, first + count)
        num_full = len(tokens) // self.block_size
        self._reset_columns(rows)
        pool.depth[rows] = np.arange(first_depth, first_depth + count, dtype=np.int32)
        previous = np.empty(count, dtype=np.int32)
        previous[0] = prev_block
        previous[1:] = block_ids[:-1]
        pool.prev_block[rows] = previous
        if num_full == count:
            pool.num_tokens[rows] = self.block_size
            pool.token_ids[rows] = tokens.reshape(count, self.block_size)
            return
        num_tokens = np.zeros(count, dtype=np.int32)
        num_tokens[:num_full] = self.block_size
        rest = len(tokens) - num_full * self.block_size
        num_tokens[num_full] = rest
        pool.num_tokens[rows] = num_tokens
        full = slice(first, first + num_full) if isinstance(rows, slice) else rows[:num_full]
        pool.token_ids[full] = tokens[: len(tokens) - rest].reshape(num_full, self.block_size)
        if rest:
            pool.token_ids[block_ids[num_full], :rest] = tokens[-rest:]

    def _reset_columns(self, rows: np.ndarray | slice) -> None:
        """Set what every new block starts with, whatever it held before."""
        self.pool.ref_count[rows] = 1
        self.pool.computed[rows] = False
        self.pool.in_prefill[rows] = False
        self.pool.last_accessed[rows] = 0.0

    def num_blocks_for(self, num_slots: int) -> int:
        """Blocks that hold `num_slots` slots."""
        return -(-num_slots // self.block_size)

    # -- arrays of blocks

    def take_new(self, count: int) -> np.ndarray:
        """Take empty blocks with one reference each, int32 [count], or raise NoFreeBlocksError."""
        block_ids = self._take(count)
        self._reset_columns(block_ids)
        self.pool.num_tokens[block_ids] = 0
        return block_ids

    def _take(self, count: int) -> np.ndarray:
        self._require(count)
        return self.pool.take(count)

    def _require(self, count: int) -> None:
        if count > self.num_free:
            raise NoFreeBlocksError(
                f"{count} blocks needed, {self.num_free} of {self.get_num_total_blocks()} "
                f"are free on {self.device.name}"
            )

    def copies_needed(self, block_ids: np.ndarray) -> np.ndarray:
        """Which of these writes need a copy first, bool [n].

        Entry i writes block_ids[i] for one of its references; entries are in the order of the
        writes, and an id may appear once a reference. Every write to a shared block needs a copy,
        but where all references write, the last one finds the block its own.
        """
        references = self.pool.ref_count[block_ids]
        shared = references > 1
        if not shared.any():
            return shared
        where = np.flatnonzero(shared)
        unique, inverse, counts = np.unique(
            block_ids[where], return_inverse=True, return_counts=True
        )
        last_write = np.empty(len(unique), dtype=np.int64)
        last_write[inverse] = where
        all_write = counts == self.pool.ref_count[unique]
        shared[last_write[all_write]] = False
        return shared

    def copy_on_write(self, sources: np.ndarray, new_ids: np.ndarray) -> np.ndarray:
        """Give up one reference of each source for a new private copy; returns new_ids."""
        self.pool.copy_rows(sources, new_ids)
        np.subtract.at(self.pool.ref_count, sources, 1)
        self.copy_on_writes.record(sources, new_ids)
        self.stats.copies += len(new_ids)
        return new_ids

    def fill(self, block_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """Note that these private blocks are full now; returns the ids that they have afterwards.

        Args:
            block_ids: int32 [n], distinct, in order.
            parents: int64 [n], the hash before each; empty without caching.
        """
        return block_ids

    def add_references(self, block_ids: np.ndarray, count: int = 1) -> None:
        """Reference distinct blocks in use `count` times more each."""
        self.pool.ref_count[block_ids] += count

    def release(self, block_ids: np.ndarray, distinct: bool = False) -> None:
        """Give up one reference of each entry, in order; an id may appear once a reference.

        Of the blocks that become free, the last one is handed out next. Copies to make into them
        are withdrawn. `distinct` says that no id appears twice, which is faster.

        Raises:
            ValueError: if an id has fewer references than entries; nothing is changed.
        """
        ref_count = self.pool.ref_count
        unique, counts = (block_ids, 1) if distinct else _count_occurrences(block_ids)
        remaining = ref_count[unique] - counts
        if remaining.min(initial=0) < 0:
            block_id = int(unique[remaining.argmin()])
            raise ValueError(f"block {block_id} on {self.device.name} was freed before")
        ref_count[unique] = remaining
        unreferenced = block_ids[ref_count[block_ids] == 0]
        if not distinct:
            unreferenced = _last_occurrences(unreferenced)
        if len(unreferenced):
            self.copy_on_writes.withdraw(unreferenced)
            self._on_unreferenced(unreferenced)

    def _on_unreferenced(self, block_ids: np.ndarray) -> None:
        self.pool.give_back(block_ids)

    def mark_computed(self, block_ids: np.ndarray) -> None:
        """Set computed for valid ids."""
        self.pool.computed[block_ids] = True

    # -- swapping: this allocator is the destination

    def plan_receive(self, source: "NaiveBlockAllocator", block_ids: np.ndarray) -> int:
        """Blocks that receiving these distinct blocks would take off the free count."""
        return len(block_ids)

    def receive(
        self, source: "NaiveBlockAllocator", block_ids: np.ndarray, references: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Take a block for each of another device's blocks.

        Args:
            block_ids: int32 [n], distinct ids of `source`.
            references: int32 [n], the references that each gets here.

        Returns:
            The ids here, int32 [n], and which of them the content must be copied into, bool [n].

        Raises:
            NoFreeBlocksError: with nothing changed.
        """
        new_ids = self._take(len(block_ids))
        self._copy_columns(source.pool, block_ids, new_ids)
        self.pool.ref_count[new_ids] = references
        return new_ids, np.ones(len(block_ids), dtype=bool)

    def _copy_columns(self, source: BlockPool, theirs: np.ndarray, ours: np.ndarray) -> None:
        pool = self.pool
        for column in _MOVED_COLUMNS:
            getattr(pool, column)[ours] = getattr(source, column)[theirs]

    # -- counts, marks, integrity

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return self.pool.num_free

    def occupancy(self) -> Occupancy:
        """How many blocks are in which state."""
        num_free = self.pool.num_free
        num_evictable = self.num_free - num_free
        in_use = self.get_num_total_blocks() - num_free - num_evictable
        return Occupancy(in_use, num_evictable, num_free)

    def get_num_free_blocks(self, device: Device | None = None) -> int:
        self._check_device(device)
        return self.num_free

    def get_num_total_blocks(self, device: Device | None = None) -> int:
        self._check_device(device)
        return self.pool.num_blocks - (self.null_block_id is not None)

    def get_num_full_blocks_touched(
        self, blocks: ListOf[Block], device: Device | None = None
    ) -> int:
        self._check_device(device)
        if not blocks:
            return 0
        block_ids = np.array([block._live_id() for block in blocks], dtype=np.int32)
        return self.plan_receive(blocks[0]._allocator, block_ids)

    def mark_blocks_as_accessed(
        self, block_ids: ListOf[int] | np.ndarray, now: float, device: Device | None = None
    ) -> None:
        self._check_device(device)
        if not np.isfinite(now):
            raise ValueError(f"now is {now!r}; expected a finite number")
        self.pool.last_accessed[self.check_ids(block_ids)] = now

    def mark_blocks_as_computed(
        self, block_ids: ListOf[int] | np.ndarray, device: Device | None = None
    ) -> None:
        self._check_device(device)
        self.mark_computed(self.check_ids(block_ids))

    def check_ids(self, block_ids: ListOf[int] | np.ndarray) -> np.ndarray:
        """Return ids as an array. Raises ValueError for one out of range or not in use."""
        ids = np.asarray(block_ids, dtype=np.int64)
        for id_ in ids[(ids < 0) | (ids >= self.pool.num_blocks)][:1]:
            raise ValueError(
                f"block id {id_} is outside [0, {self.pool.num_blocks}) on {self.device.name}"
            )
        for id_ in ids[self.pool.ref_count[ids] == 0][:1]:
            raise ValueError(f"block {id_} on {self.device.name} is not in use")
        return ids

    def get_common_computed_block_ids(self, lists: ListOf[ListOf[int]]) -> list[int]:
        return []

    def find_cached_prefix(
        self, token_ids: ListOf[int] | np.ndarray, extra_key: object = None
    ) -> np.ndarray:
        as_token_ids(token_ids)
        return _NO_IDS

    def clear_copy_on_writes(self) -> np.ndarray:
        return self.copy_on_writes.drain()

    def get_prefix_cache_hit_rate(self, device: Device | None = None) -> float:
        self._check_device(device)
        return self.stats.hit_rate

    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        self._check_device(device)
        if self.num_free != self.get_num_total_blocks():
            return False
        self.pool.forget_order(0 if self.null_block_id is None else 1)
        self.stats = CacheStats()
        return True

    def check_integrity(self, references: np.ndarray | None = None) -> None:
        """As in `BlockAllocator`; with `references`, int [num_blocks], counts must equal these."""
        pool = self.pool
        free_ids = pool.free_ids()
        in_use = np.flatnonzero(pool.ref_count)
        evictable = self._evictable_ids()
        everything = np.concatenate([free_ids, evictable, in_use])
        assert len(everything) == pool.num_blocks, (
            f"{len(free_ids)} free + {len(evictable)} evictable + {len(in_use)} in use "
            f"!= {pool.num_blocks} on {self.device.name}"
        )
        assert len(np.unique(everything)) == pool.num_blocks, "a block is in two states at once"
        assert pool.ref_count.min(initial=0) >= 0, "a reference count is negative"
        if references is not None:
            expected = np.array(references, dtype=np.int64)
            if self.null_block_id is not None:
                expected[self.null_block_id] = 1
            wrong = np.flatnonzero(expected != pool.ref_count)
            assert not len(wrong), (
                f"blocks {wrong[:8].tolist()} on {self.device.name} have reference counts "
                f"{pool.ref_count[wrong[:8]].tolist()}; expected {expected[wrong[:8]].tolist()}"
            )
        tokens = pool.num_tokens[in_use]
        assert ((tokens >= 0) & (tokens <= self.block_size)).all(), "a block is over-full"
        pending = self.copy_on_writes.destinations()
        assert (pool.ref_count[pending] > 0).all(), "a copy into a block that was given back"

    def _evictable_ids(self) -> np.ndarray:
        return _NO_IDS

    def _check_device(self, device: Device | None) -> None:
        if device is not None and device != self.device:
            raise ValueError(f"device is {device!r}; this allocator serves {self.device!r}")


def _count_occurrences(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct ids, ascending, and how often each occurs."""
    ordered = np.sort(ids)
    starts = np.flatnonzero(np.concatenate([ordered[:1] >= 0, ordered[1:] != ordered[:-1]]))
    return ordered[starts], np.diff(starts, append=len(ordered)).astype(np.int32)


def _last_occurrences(ids: np.ndarray) -> np.ndarray:
    """Drop all but the last occurrence of each id, keeping the order."""
    if len(ids) < 2:
        return ids
    _, last = np.unique(ids[::-1], return_index=True)
    return ids[np.sort(len(ids) - 1 - last)]
