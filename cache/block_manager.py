"""BlockSpaceManager: which sequences get blocks, and when.

A scheduler asks `can_allocate`, `can_append_slots` and `can_swap_in`, then acts. An answer of OK
means that the action succeeds if nothing happens in between. Every action completes or raises with
nothing changed.

Methods that take `rows` are the batch forms, for schedulers that run thousands of steps a second: a
row is a sequence's row in `tables`, as `rows_of` gives it.
"""

import numbers
from collections.abc import Sequence as ListOf

import numpy as np

from .content_hash import HashAlgorithm, encode_extra_key
from .cpu_gpu import CpuGpuBlockAllocator
from .evictor import EvictorChoice
from .interfaces import AllocStatus, Device, SeqId, as_count, as_token_ids
from .naive import NaiveBlockAllocator, Occupancy, SequencePlan
from .prefix_caching import PrefixCachingBlockAllocator
from .sequence import Sequence, SequenceGroup, SequenceStatus
from .stats import CacheStats


class BlockSpaceManager:
    """Owns the blocks of a GPU and a CPU pool.

    Args:
        block_size: tokens a block, at least 1.
        num_gpu_blocks: at least 1.
        num_cpu_blocks: at least 0; for swapping.
        watermark: the share of GPU blocks, in [0, 1), that admitting a request leaves free, so
            that running sequences can grow. Appending may use them.
        sliding_window: keys that a query sees, itself included; None for all. Blocks before the
            window are given up as sequences grow. Costs one block, the null block.
        enable_caching: share full blocks with equal prefixes.
        evictor, hash_seed, hash_algorithm: for caching; see `make_evictor`, `ContentHasher`.
        track_index_changes: keep what a copy of the PrefixIndex on a GPU must be told.
        reuse_uncached_first: for caching; see `PrefixCachingBlockAllocator`.

    Attributes:
        tables: the block tables of all sequences, as arrays; see `BlockTables`.

    Raises:
        ValueError: for a value out of range, caching together with a sliding window, or a
            watermark that refuses every request.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        enable_caching: bool = False,
        *,
        evictor: EvictorChoice = "lru",
        hash_seed: int | None = None,
        hash_algorithm: HashAlgorithm = "mix64",
        track_index_changes: bool = False,
        reuse_uncached_first: bool = True,
    ) -> None:
        self.block_size = as_count("block_size", block_size, 1)
        num_gpu_blocks = as_count("num_gpu_blocks", num_gpu_blocks, 1)
        num_cpu_blocks = as_count("num_cpu_blocks", num_cpu_blocks, 0)
        is_number = isinstance(watermark, numbers.Real) and not isinstance(watermark, bool)
        if not is_number or not 0 <= watermark < 1:
            raise ValueError(f"watermark is {watermark!r}; expected a number in [0, 1)")
        if sliding_window is not None:
            as_count("sliding_window", sliding_window, 1)
            if enable_caching:
                raise ValueError("prefix caching with a sliding window is not supported")
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self._max_window_blocks = (
            None if sliding_window is None else sliding_window // block_size + 1
        )
        self.allocator = CpuGpuBlockAllocator.create(
            "prefix_caching" if enable_caching else "naive",
            num_gpu_blocks,
            num_cpu_blocks,
            self.block_size,
            evictor=evictor,
            hash_seed=hash_seed,
            hash_algorithm=hash_algorithm,
            reserve_null_block=sliding_window is not None,
            track_index_changes=track_index_changes,
            reuse_uncached_first=reuse_uncached_first,
        )
        self._gpu: NaiveBlockAllocator = self.allocator.allocator(Device.GPU)
        self.tables = self.allocator.tables
        if self._gpu.get_num_total_blocks() - 1 < self.watermark_blocks:
            raise ValueError(
                f"watermark {watermark!r} keeps {self.watermark_blocks} of "
                f"{self._gpu.get_num_total_blocks()} usable blocks free: every request would be "
                "refused"
            )
        self._row_of: dict[SeqId | int, int] = {}

    # -- admission

    def can_allocate(self, group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """Whether the group's waiting sequences can have blocks for their prompt.

        NEVER if even an empty pool would be left with fewer than the watermark's blocks.
        """
        seq = self._waiting(group)[0]
        num_slots = seq.num_tokens + as_count("num_lookahead_slots", num_lookahead_slots, 0)
        required = self._gpu.num_blocks_for(num_slots)
        if self._gpu.get_num_total_blocks() - required < self.watermark_blocks:
            return AllocStatus.NEVER
        if self._gpu.num_free - required >= self.watermark_blocks:
            return AllocStatus.OK
        taken = self._plan(seq, num_slots).num_taken
        if self._gpu.num_free - taken >= self.watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def allocate(self, group: SequenceGroup, num_lookahead_slots: int = 0) -> None:
        """Take the blocks for the prompt of the group's waiting sequences, which share them.

        Does not look at the watermark.

        Raises:
            ValueError: if none is waiting, one has blocks already, or their prompts or extra keys
                differ.
            NoFreeBlocksError: with nothing changed.
        """
        seqs = self._waiting(group)
        for seq in seqs:
            if seq.seq_id in self._row_of:
                raise ValueError(f"sequence {seq.seq_id!r} has blocks already")
            if seq is not seqs[0] and not _share_prompt(seq, seqs[0]):
                raise ValueError(f"waiting sequences of request {group.request_id!r} differ")
        num_lookahead_slots = as_count("num_lookahead_slots", num_lookahead_slots, 0)
        root, hashes = self._hashes_of(seqs[0])
        row = self.tables.allocate(seqs[0].token_ids, num_lookahead_slots, Device.GPU, root, hashes)
        self._row_of[seqs[0].seq_id] = row
        if len(seqs) > 1:
            rows = self.tables.fork(row, len(seqs) - 1)
            self._row_of.update(zip((s.seq_id for s in seqs[1:]), rows.tolist(), strict=True))

    def _waiting(self, group: SequenceGroup) -> list[Sequence]:
        seqs = group.get_seqs(SequenceStatus.WAITING)
        if not seqs:
            raise ValueError(f"request {group.request_id!r} has no waiting sequence")
        return seqs

    def _plan(self, seq: Sequence, num_slots: int) -> SequencePlan:
        root, hashes = self._hashes_of(seq)
        return self._gpu.plan(seq.token_ids, num_slots, root, hashes)

    def _hashes_of(self, seq: Sequence) -> tuple[np.int64 | None, np.ndarray | None]:
        """Return root and block hashes, kept with the sequence while it waits for room."""
        gpu = self._gpu
        if not isinstance(gpu, PrefixCachingBlockAllocator):
            return None, None
        root = gpu.hasher.root(seq.extra_key)
        key = (gpu.hasher, root, seq.num_tokens)
        if seq._hashes is None or seq._hashes[0] != key:
            num_full = seq.num_tokens // self.block_size
            blocks = seq.token_ids[: num_full * self.block_size].reshape(num_full, self.block_size)
            seq._hashes = (key, gpu.hasher.hash_chain(blocks, root))
        return root, seq._hashes[1]

    # -- growth

    def can_append_slots(self, group: SequenceGroup, num_lookahead_slots: int = 0) -> bool:
        """Whether `append_slots` would succeed for all the group's sequences on the GPU.

        False if none is there.
        """
        seqs = [seq for seq in group.get_seqs() if self._on_gpu(seq)]
        if not seqs:
            return False
        rows = self.rows_of(seqs)
        counts = self._num_unseen(seqs, rows)
        taken = self.tables.num_blocks_taken_by_append(rows, counts, num_lookahead_slots)
        return taken <= self._gpu.num_free

    def append_slots(self, seq: Sequence, num_lookahead_slots: int = 0) -> np.ndarray:
        """Take slots for the tokens of a sequence that its table does not hold yet.

        Returns:
            The copies to make before the step writes, (source, destination) int64 [n, 2].

        Raises:
            ValueError: for an unknown sequence, or one that is swapped out.
            NoFreeBlocksError: with nothing changed.
        """
        rows = self.rows_of([seq])
        self._require_on(rows, Device.GPU, "append to")
        computed = np.array([as_count("num_computed_tokens", seq.num_computed_tokens, 0)])
        start = self.tables.seq_lens[rows[0]]
        counts = self._num_unseen([seq], rows)
        self.tables.append(rows, seq.token_ids[start:], counts, num_lookahead_slots)
        if self._max_window_blocks is not None:
            self.tables.drop_before_window(rows, computed, self._max_window_blocks)
        return self._gpu.clear_copy_on_writes()

    def num_blocks_taken_by_append(self, rows: np.ndarray, num_lookahead_slots: int = 0) -> int:
        """New blocks and copies that `append_slots_batch` would take for these rows."""
        return self.tables.num_blocks_taken_by_append(rows, 1, num_lookahead_slots)

    def append_slots_batch(
        self,
        rows: np.ndarray,
        token_ids: ListOf[int] | np.ndarray,
        num_lookahead_slots: int = 0,
    ) -> np.ndarray:
        """Append one token to each of many sequences.

        With a sliding window, the tokens in the tables so far count as computed.

        Args:
            rows: int64 [n], distinct, on the GPU.
            token_ids: [n].

        Returns:
            The copies to make before the step writes, (source, destination) int64 [n, 2].

        Raises:
            ValueError: for rows that repeat, are free or swapped out, or for bad tokens.
            NoFreeBlocksError: with nothing changed.
        """
        rows = as_rows(rows)
        tokens = as_token_ids(token_ids)
        if len(tokens) != len(rows):
            raise ValueError(f"{len(tokens)} tokens for {len(rows)} rows; expected one each")
        self._require_on(rows, Device.GPU, "append to")
        ordered = np.sort(rows)
        if np.count_nonzero(ordered[1:] == ordered[:-1]):
            raise ValueError("a row appears twice in one batch")
        self.tables.append(rows, tokens, None, num_lookahead_slots)
        if self._max_window_blocks is not None:
            computed = self.tables.seq_lens[rows] - 1
            self.tables.drop_before_window(rows, computed, self._max_window_blocks)
        return self._gpu.clear_copy_on_writes()

    def _num_unseen(self, seqs: ListOf[Sequence], rows: np.ndarray) -> np.ndarray:
        totals = np.array([seq.num_tokens for seq in seqs], dtype=np.int64)
        unseen = totals - self.tables.seq_lens[rows]
        for seq, count in zip(seqs, unseen.tolist(), strict=True):
            if count < 0:
                raise ValueError(f"sequence {seq.seq_id!r} has fewer tokens than its table")
        return unseen

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child share all blocks of the parent.

        Raises:
            ValueError: if the parent has no blocks or the child has some.
        """
        row = self._row(parent)
        if child.seq_id in self._row_of:
            raise ValueError(f"sequence {child.seq_id!r} has blocks already")
        self._row_of[child.seq_id] = int(self.tables.fork(row)[0])

    def fork_many(self, parent: Sequence, children: ListOf[Sequence]) -> np.ndarray:
        """Fork a parent into many children at once; returns their rows, int64 [n]."""
        row = self._row(parent)
        seq_ids = [child.seq_id for child in children]
        for seq_id in seq_ids:
            if seq_id in self._row_of:
                raise ValueError(f"sequence {seq_id!r} has blocks already")
        if len(set(seq_ids)) != len(seq_ids):
            raise ValueError("two children have one sequence id")
        rows = self.tables.fork(row, len(children))
        self._row_of.update(zip(seq_ids, rows.tolist(), strict=True))
        return rows

    def free(self, seq: Sequence) -> None:
        """Give up the blocks of a sequence. Raises ValueError for an unknown one."""
        self.free_many([seq])

    def free_many(self, seqs: ListOf[Sequence]) -> None:
        """Give up the blocks of distinct sequences; those of the last are given up first."""
        rows = self.rows_of(seqs)
        if len(set(rows.tolist())) != len(rows):
            raise ValueError("a sequence appears twice in one batch")
        self.tables.free(rows)
        for seq in seqs:
            del self._row_of[seq.seq_id]

    # -- swap

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Whether the CPU pool has room for the group's blocks on the GPU."""
        rows = self._rows_on(group, Device.GPU)
        taken = self.tables.num_blocks_taken_by_swap(rows, Device.CPU)
        return taken <= self.get_num_free_cpu_blocks()

    def swap_out(self, group: SequenceGroup) -> np.ndarray:
        """Move the group's blocks to the CPU; those that its sequences share move once.

        Returns:
            What to copy, (GPU block, CPU block), int64 [n, 2].

        Raises:
            ValueError: if the group has no blocks on the GPU, or copies into them are pending.
            NoFreeBlocksError: with nothing changed.
        """
        rows = self._rows_on(group, Device.GPU)
        return self.tables.swap(rows, Device.GPU, Device.CPU)

    def can_swap_in(self, group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """Whether the group can come back and `append_slots` succeed for each of its sequences.

        The watermark counts as in `can_allocate`.
        """
        rows = self._rows_on(group, Device.CPU)
        seqs = [seq for seq in group.get_seqs() if self._row_of.get(seq.seq_id) in rows]
        growth = self.tables.num_blocks_taken_by_append(
            rows, self._num_unseen(seqs, rows), num_lookahead_slots, Device.CPU
        )
        moved = self.tables.num_distinct_blocks(rows)
        if self._gpu.get_num_total_blocks() - moved - growth < self.watermark_blocks:
            return AllocStatus.NEVER
        taken = self.tables.num_blocks_taken_by_swap(rows, Device.GPU) + growth
        if self._gpu.num_free - taken >= self.watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def swap_in(self, group: SequenceGroup) -> np.ndarray:
        """Move the group's blocks back to the GPU.

        Returns:
            What to copy, (CPU block, GPU block), int64 [n, 2]. Blocks whose content is cached on
            the GPU are shared there and not copied.

        Raises:
            ValueError: if the group has no blocks on the CPU.
            NoFreeBlocksError: with nothing changed.
        """
        rows = self._rows_on(group, Device.CPU)
        return self.tables.swap(rows, Device.CPU, Device.GPU)

    def _rows_on(self, group: SequenceGroup, device: Device) -> np.ndarray:
        rows = [
            row
            for seq in group.get_seqs()
            if (row := self._row_of.get(seq.seq_id)) is not None
            and self.tables.devices[row] == device
        ]
        if not rows:
            raise ValueError(f"request {group.request_id!r} has no blocks on {device.name}")
        return np.array(rows, dtype=np.int64)

    # -- what a step needs to know, and what it did

    def rows_of(self, seqs: ListOf[Sequence]) -> np.ndarray:
        """The rows of sequences in `tables`, int64 [n]. Raises ValueError for an unknown one."""
        return np.array([self._row(seq) for seq in seqs], dtype=np.int64)

    def get_block_table(self, seq: Sequence) -> np.ndarray:
        """The block ids of a sequence on its device, int32 [num_blocks], a copy."""
        return self.tables.block_ids(self._row(seq)).copy()

    def get_slot_mapping(self, seq: Sequence, start: int, end: int) -> np.ndarray:
        """The slots of token positions start to end, int64; block_id * block_size + offset.

        Raises:
            ValueError: for an unknown sequence, or positions that its blocks don't cover.
        """
        row = self._row(seq)
        if not 0 <= start <= end <= self.tables.num_blocks[row] * self.block_size:
            raise ValueError(
                f"positions {start} to {end} are not within the "
                f"{self.tables.num_blocks[row]} blocks of sequence {seq.seq_id!r}"
            )
        return self.tables.slot_mapping(row, start, end)

    def get_num_cached_tokens(self, seq: Sequence) -> int:
        """Tokens from the start that need not be computed, a multiple of block_size.

        For a sequence with blocks: as found when it was admitted. For another: as of now.
        """
        row = self._row_of.get(seq.seq_id)
        if row is not None:
            return int(self.tables.num_cached_tokens[row])
        return self._plan(seq, seq.num_tokens).num_computed_blocks * self.block_size

    def get_common_computed_block_ids(self, seqs: ListOf[Sequence]) -> list[int]:
        """The longest run of computed GPU blocks that all sequences start with."""
        rows = self.rows_of(seqs)
        if np.count_nonzero(self.tables.devices[rows] != Device.GPU):
            return []
        return self._gpu.get_common_computed_block_ids([self.tables.block_ids(row) for row in rows])

    def access_all_blocks_in_seq(self, seq: Sequence, now: float) -> None:
        """Set last_accessed of a sequence's blocks. The unit of time is the caller's."""
        row = self._row(seq)
        allocator = self.allocator.allocator(Device(int(self.tables.devices[row])))
        allocator.mark_blocks_as_accessed(self.tables.owned_block_ids(row), now)

    def mark_blocks_as_computed(
        self, group: SequenceGroup, num_computed_tokens: int | None = None
    ) -> None:
        """Say, after a step, that the KV of the group's sequences on the GPU was written.

        Args:
            group: the request that the step computed.
            num_computed_tokens: tokens from the start, for a prompt computed in chunks; by
                default all that its tables hold.
        """
        rows = self.rows_of([seq for seq in group.get_seqs() if self._on_gpu(seq)])
        lens = self.tables.seq_lens[rows].astype(np.int64)
        if num_computed_tokens is not None:
            lens = np.minimum(lens, as_count("num_computed_tokens", num_computed_tokens, 0))
        self.tables.mark_computed(rows, lens)

    def mark_blocks_as_computed_batch(
        self, rows: np.ndarray, num_computed_tokens: np.ndarray
    ) -> None:
        """As `mark_blocks_as_computed`, for many rows; int64 [n] each."""
        self._require_on(rows, Device.GPU, "compute")
        lens = np.minimum(self.tables.seq_lens[rows], num_computed_tokens)
        self.tables.mark_computed(rows, lens)

    # -- counts

    def get_num_free_gpu_blocks(self) -> int:
        """GPU blocks that an allocation can take: free plus evictable."""
        return self._gpu.num_free

    def get_num_free_cpu_blocks(self) -> int:
        """CPU blocks that a swap can take: free plus evictable."""
        return self.allocator.get_num_free_blocks(Device.CPU)

    def get_num_total_gpu_blocks(self) -> int:
        """GPU blocks that sequences can own: all but the null block, where there is one."""
        return self._gpu.get_num_total_blocks()

    def get_gpu_occupancy(self) -> Occupancy:
        """How many GPU blocks are in which state."""
        return self._gpu.occupancy()

    def get_prefix_cache_hit_rate(self, device: Device = Device.GPU) -> float:
        """Full prompt blocks found in the cache as a share of those looked up."""
        return self.allocator.get_prefix_cache_hit_rate(device)

    def get_stats(self, device: Device = Device.GPU) -> CacheStats:
        """The counters of one device's allocator."""
        return self.allocator.allocator(device).stats

    def reset_prefix_cache(self, device: Device = Device.GPU) -> bool:
        """Forget all cached content. Returns False, with nothing changed, if a block is in use."""
        return self.allocator.reset_prefix_cache(device)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming what is wrong, unless every invariant holds."""
        self.allocator.check_integrity()
        used = {row for row in self._row_of.values() if self.tables.devices[row] >= 0}
        assert len(used) == len(self._row_of), "two sequences share a row, or one has a free row"

    def _row(self, seq: Sequence) -> int:
        row = self._row_of.get(seq.seq_id)
        if row is None:
            raise ValueError(f"sequence {seq.seq_id!r} has no blocks")
        return row

    def _on_gpu(self, seq: Sequence) -> bool:
        row = self._row_of.get(seq.seq_id)
        return row is not None and self.tables.devices[row] == Device.GPU

    def _require_on(self, rows: np.ndarray, device: Device, verb: str) -> None:
        devices = self.tables.devices
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(devices):
            raise ValueError(f"rows are {rows.tolist()}; expected numbers in [0, {len(devices)})")
        wrong = devices[rows] != device
        if np.count_nonzero(wrong):
            raise ValueError(
                f"cannot {verb} row {int(rows[wrong.argmax()])}: it is not on {device.name}"
            )


def as_rows(rows: ListOf[int] | np.ndarray) -> np.ndarray:
    """Return rows as int64 [n]. Raises ValueError for other shapes or numbers."""
    array = np.asarray(rows)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"rows are {rows!r}; expected integers in one dimension")
    return array.astype(np.int64, copy=False)


def _share_prompt(one: Sequence, other: Sequence) -> bool:
    return np.array_equal(one.token_ids, other.token_ids) and encode_extra_key(
        one.extra_key
    ) == encode_extra_key(other.extra_key)
