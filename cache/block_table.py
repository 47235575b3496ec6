"""Block tables: which blocks a sequence owns, in order.

`BlockTables` holds the tables of all sequences as rows of one array and does the work, for one row
or for many at once. `BlockTable` is a view on one row.
"""

from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .block_pool import NO_BLOCK
from .interfaces import Block, Device, NoFreeBlocksError, as_count, as_token_ids
from .naive import NaiveBlockAllocator

if TYPE_CHECKING:
    from .cpu_gpu import CpuGpuBlockAllocator

FREE_ROW = -1


class _AppendPlan(NamedTuple):
    """The entries of block tables that an append touches, in row order, then in block order."""

    rows: np.ndarray  # int64 [num_entries], the row of each entry
    indices: np.ndarray  # int64 [num_entries], its block index in the row
    block_ids: np.ndarray  # int32 [num_entries], NO_BLOCK where there is no block yet
    copied: np.ndarray  # bool [num_entries], shared blocks that are written
    num_taken: int  # new blocks and copies


class BlockTables:
    """The block tables of all sequences.

    Attributes:
        block_tables: int32 [num_rows, width]; the first num_blocks entries of a row are meaningful,
            the others, at least one, are -1. `torch.from_numpy` shares it until a row or a column
            more is needed; then it moves to a larger array.
        seq_lens: int32 [num_rows], tokens in the table.
        num_blocks: int32 [num_rows].
        num_null: int32 [num_rows], leading entries that were replaced by the null block.
        num_cached_tokens: int32 [num_rows], tokens found computed on allocation.
        num_marked: int32 [num_rows], leading blocks that `mark_computed` has marked for the row.
        devices: int8 [num_rows], a `Device` or FREE_ROW.
        room: int32 [num_rows], tokens that can be written behind the last one with nothing to ask:
            the last block has that many empty slots and is private. 0 also where that is not known.
        next_slots: int64 [num_rows], where `room` is not 0 the slot of the next token.
        roots: int64 [num_rows], the hash before the first block.
    """

    def __init__(self, allocators: ListOf[NaiveBlockAllocator], num_rows: int, width: int) -> None:
        self.allocators = list(allocators)
        self.block_size = allocators[0].block_size
        self.block_tables = np.full((num_rows, width), NO_BLOCK, dtype=np.int32)
        self.seq_lens = np.zeros(num_rows, dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int32)
        self.num_null = np.zeros(num_rows, dtype=np.int32)
        self.num_cached_tokens = np.zeros(num_rows, dtype=np.int32)
        self.num_marked = np.zeros(num_rows, dtype=np.int32)
        self.devices = np.full(num_rows, FREE_ROW, dtype=np.int8)
        self.room = np.zeros(num_rows, dtype=np.int32)
        self.next_slots = np.zeros(num_rows, dtype=np.int64)
        self.roots = np.zeros(num_rows, dtype=np.int64)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    # -- one sequence

    def allocate(
        self,
        tokens: np.ndarray,
        num_lookahead_slots: int = 0,
        device: Device = Device.GPU,
        root: np.int64 | None = None,
        hashes: np.ndarray | None = None,
    ) -> int:
        """Take the blocks of a new sequence and return its row.

        Args:
            tokens: int32 [num_tokens], checked by `as_token_ids`.
            num_lookahead_slots: empty slots wanted behind the tokens.
            root, hashes: as `NaiveBlockAllocator.plan`.

        Raises:
            NoFreeBlocksError: with nothing changed.
        """
        allocator = self.allocators[device]
        plan = allocator.plan(tokens, len(tokens) + num_lookahead_slots, root, hashes)
        block_ids = allocator.allocate_sequence(tokens, plan)
        row = self._take_row(len(block_ids))
        self.block_tables[row, : len(block_ids)] = block_ids
        self.num_blocks[row] = len(block_ids)
        self.seq_lens[row] = len(tokens)
        self.num_cached_tokens[row] = plan.num_computed_blocks * self.block_size
        self.devices[row] = device
        self.roots[row] = plan.root
        return row

    def open_row(self, device: Device, root: np.int64) -> int:
        """Return the row of a new, empty table."""
        row = self._take_row(0)
        self.devices[row] = device
        self.roots[row] = root
        return row

    def set_blocks(self, row: int, block_ids: np.ndarray) -> None:
        """Enter blocks, already referenced, into an empty row."""
        self._ensure_width(len(block_ids))
        self.block_tables[row, : len(block_ids)] = block_ids
        self.num_blocks[row] = len(block_ids)
        pool = self.allocators[self.devices[row]].pool
        self.seq_lens[row] = pool.num_tokens[block_ids].sum()

    def block_ids(self, row: int) -> np.ndarray:
        """The block ids of a row, int32 [num_blocks], a view."""
        return self.block_tables[row, : self.num_blocks[row]]

    def owned_block_ids(self, row: int) -> np.ndarray:
        """The block ids of a row without its null blocks, a view."""
        return self.block_tables[row, self.num_null[row] : self.num_blocks[row]]

    def fork(self, row: int, count: int = 1) -> np.ndarray:
        """Return `count` new rows, int64, that share every block of this one."""
        self.allocators[self.devices[row]].add_references(self.owned_block_ids(row), count)
        length = self.num_blocks[row]
        self.room[row] = 0
        rows = np.array([self._take_row(length) for _ in range(count)], dtype=np.int64)
        self.block_tables[rows, :length] = self.block_tables[row, :length]
        for name in _COLUMNS:
            column = getattr(self, name)
            column[rows] = column[row]
        return rows

    def free(self, rows: ListOf[int] | np.ndarray) -> None:
        """Give up all blocks of these distinct rows, last block of the last row first.

        So a suffix is evicted before its prefix, and the block that is handed out next is the
        first one of the first row.
        """
        rows = np.asarray(rows, dtype=np.int64)
        for device, allocator in enumerate(self.allocators):
            parts = [
                self.owned_block_ids(row)[::-1] for row in rows[::-1] if self.devices[row] == device
            ]
            if len(parts) == 1:
                allocator.release(parts[0], distinct=True)
            elif parts:
                allocator.release(np.concatenate(parts))
        self.block_tables[rows, : self.num_blocks[rows].max(initial=0)] = NO_BLOCK
        for name in _COLUMNS:
            getattr(self, name)[rows] = 0
        self.devices[rows] = FREE_ROW
        self._free_rows.extend(rows[::-1].tolist())

    # -- appending, for many sequences at once

    def num_blocks_taken_by_append(
        self,
        rows: np.ndarray,
        counts: np.ndarray | int = 1,
        num_lookahead_slots: int = 0,
        device: Device = Device.GPU,
    ) -> int:
        """New blocks and copies that `append` would take for these rows, all on `device`.

        Rows on the CPU take as many once they are swapped in.
        """
        if np.ndim(counts) == 0 and counts == 1 and not num_lookahead_slots:
            rows = rows[self.room[rows] == 0]
            if not len(rows):
                return 0
        return self._plan_append(rows, counts, num_lookahead_slots, device).num_taken

    def append(
        self,
        rows: np.ndarray,
        token_ids: np.ndarray,
        counts: np.ndarray | None = None,
        num_lookahead_slots: int = 0,
    ) -> None:
        """Append tokens to distinct rows on the GPU.

        All new blocks and copies are taken first, in the order of the rows, then all tokens are
        written, then full blocks are exchanged for cached ones.

        Args:
            rows: int64 [num_rows].
            token_ids: int32 [sum of counts], row after row, checked by `as_token_ids`.
            counts: int64 [num_rows], tokens for each row; one each by default.
            num_lookahead_slots: empty slots wanted behind the tokens of each row.

        Raises:
            NoFreeBlocksError: with nothing changed.
        """
        if counts is None and not num_lookahead_slots:
            self._append_one_each(rows, token_ids)
            return
        if counts is None:
            counts = np.ones(len(rows), dtype=np.int64)
        plan = self._plan_append(rows, counts, num_lookahead_slots)
        if plan.num_taken:
            self._take_blocks(plan)
        of_row = np.repeat(rows, counts)
        positions = np.repeat(self.seq_lens[rows] - np.cumsum(counts) + counts, counts)
        positions += np.arange(len(token_ids))
        self.seq_lens[rows] += counts.astype(np.int32)
        self.room[rows] = 0
        indices = positions // self.block_size
        offsets = positions - indices * self.block_size
        block_ids = self.block_tables[of_row, indices].astype(np.int64)
        pool = self.allocators[Device.GPU].pool
        pool.flat_token_ids[block_ids * self.block_size + offsets] = token_ids
        # Of the tokens in one block the last is the one that counts, and the last to be assigned.
        pool.num_tokens[block_ids] = offsets + 1
        full = np.flatnonzero(offsets == self.block_size - 1)
        if len(full):
            self._fill(of_row[full], indices[full])

    def _append_one_each(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """`append` for the common case. Where there is room, nothing is asked: only written."""
        room = self.room[rows]
        if np.count_nonzero(room) < len(room):
            self._make_room(rows[room == 0])
            room = self.room[rows]
        slots = self.next_slots[rows]
        pool = self.allocators[Device.GPU].pool
        pool.flat_token_ids[slots] = token_ids
        block_ids = slots // self.block_size
        pool.num_tokens[block_ids] += 1
        self.next_slots[rows] = slots + 1
        self.room[rows] = room - 1
        self.seq_lens[rows] += 1
        is_full = room == 1
        if np.count_nonzero(is_full):
            rows = rows[is_full]
            self._fill(rows, (self.seq_lens[rows] - 1) // self.block_size)

    def _make_room(self, rows: np.ndarray) -> None:
        """Take what the next token of each row needs, and find its slot."""
        starts = self.seq_lens[rows]
        indices = starts // self.block_size
        self._ensure_width(int(indices.max()) + 1)
        if np.count_nonzero(self.block_tables[rows, indices] == NO_BLOCK) == len(rows):
            new_ids = self.allocators[Device.GPU].take_new(len(rows))
            self._enter_new(rows, indices, new_ids)
            self.next_slots[rows] = new_ids.astype(np.int64) * self.block_size
            self.room[rows] = self.block_size
            return
        plan = self._plan_append(rows, 1, 0)
        if plan.num_taken:
            self._take_blocks(plan)
        offsets = starts - indices * self.block_size
        block_ids = self.block_tables[rows, indices].astype(np.int64)
        self.next_slots[rows] = block_ids * self.block_size + offsets
        self.room[rows] = self.block_size - offsets

    def _plan_append(
        self,
        rows: np.ndarray,
        counts: np.ndarray | int,
        num_lookahead_slots: int,
        device: Device = Device.GPU,
    ) -> _AppendPlan:
        as_count("num_lookahead_slots", num_lookahead_slots, 0)
        starts = self.seq_lens[rows]
        indices = starts // self.block_size
        ends = -(-(starts + (counts + num_lookahead_slots)) // self.block_size)
        self._ensure_width(int(ends.max(initial=0)))
        if np.count_nonzero(ends - indices == 1) == len(rows) and np.ndim(counts) == 0 and counts:
            written = None
        else:
            num_entries = np.maximum(ends - indices, 0)
            first_entry = np.cumsum(num_entries) - num_entries
            last_written = (starts + counts - 1) // self.block_size
            last_written[np.broadcast_to(np.equal(counts, 0), len(rows))] = -1
            indices = np.repeat(indices - first_entry, num_entries) + np.arange(num_entries.sum())
            written = indices <= np.repeat(last_written, num_entries)
            rows = np.repeat(rows, num_entries)
        block_ids = self.block_tables[rows, indices]
        missing = block_ids < 0
        num_missing = int(np.count_nonzero(missing))
        copied = np.zeros(len(rows), dtype=bool)
        if num_missing < len(rows):
            writes = ~missing if written is None else written & ~missing
            copied[writes] = self.allocators[device].copies_needed(block_ids[writes])
        num_taken = num_missing + int(np.count_nonzero(copied))
        return _AppendPlan(rows, indices, block_ids, copied, num_taken)

    def _take_blocks(self, plan: _AppendPlan) -> None:
        """Take the new blocks and copies of a plan and enter them into the tables."""
        allocator = self.allocators[Device.GPU]
        missing = plan.block_ids < 0
        wanted = missing | plan.copied
        rows, indices = plan.rows[wanted], plan.indices[wanted]
        new_ids = allocator.take_new(plan.num_taken)
        if plan.num_taken > np.count_nonzero(missing):
            copied = plan.copied[wanted]
            self.block_tables[rows[copied], indices[copied]] = new_ids[copied]
            allocator.copy_on_write(plan.block_ids[plan.copied], new_ids[copied])
            rows, indices, new_ids = rows[~copied], indices[~copied], new_ids[~copied]
        self._enter_new(rows, indices, new_ids)

    def _enter_new(self, rows: np.ndarray, indices: np.ndarray, new_ids: np.ndarray) -> None:
        """Put empty blocks at the ends of tables; those of one row in order."""
        self.block_tables[rows, indices] = new_ids
        self.num_blocks[rows] = indices + 1
        pool = self.allocators[Device.GPU].pool
        pool.depth[new_ids] = indices
        # The index before the first is the last column, which no row reaches.
        pool.prev_block[new_ids] = self.block_tables[rows, indices - 1]

    def _fill(self, rows: np.ndarray, indices: np.ndarray) -> None:
        """Tell the allocator of full blocks, those of a row in order, and enter what it answers."""
        if len(rows) > 1 and (rows[1:] == rows[:-1]).any():
            # A block's hash needs the one before it: first the first block of each row, and so on.
            starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
            layer = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
            for number in range(int(layer.max()) + 1):
                self._fill(rows[layer == number], indices[layer == number])
            return
        allocator = self.allocators[Device.GPU]
        pool = allocator.pool
        before = self.block_tables[rows, indices - 1]
        parents = np.where(indices > 0, pool.content_hash[before], self.roots[rows])
        block_ids = self.block_tables[rows, indices]
        filled = allocator.fill(block_ids, parents)
        if filled is block_ids:
            return
        self.block_tables[rows, indices] = filled
        followed = indices + 1 < self.num_blocks[rows]
        next_ids = self.block_tables[rows[followed], indices[followed] + 1]
        pool.prev_block[next_ids] = filled[followed]

    # -- sliding window

    def drop_before_window(
        self, rows: np.ndarray, num_computed_slots: np.ndarray, max_blocks: int
    ) -> None:
        """Replace blocks that no later query reads by the null block.

        Args:
            rows: int64 [num_rows], on the GPU.
            num_computed_slots: int64 [num_rows]: no query before this position is still to come.
            max_blocks: window // block_size + 1. The first key that such a window shows to a query
                at position q is at or after q + 2 - max_blocks * block_size.
        """
        allocator = self.allocators[Device.GPU]
        num_computed_slots = np.minimum(num_computed_slots, self.seq_lens[rows])
        ends = (num_computed_slots + 2) // self.block_size - max_blocks
        late = ends > self.num_null[rows]
        for row, end in zip(rows[late].tolist(), ends[late].tolist(), strict=True):
            start = self.num_null[row]
            allocator.release(self.block_tables[row, start:end][::-1].copy(), distinct=True)
            self.block_tables[row, start:end] = allocator.null_block_id
            self.num_null[row] = end

    # -- swap

    def num_distinct_blocks(self, rows: ListOf[int] | np.ndarray) -> int:
        """Blocks that these rows, all on one device, own together."""
        return len(np.unique(self._owned(rows)))

    def num_blocks_taken_by_swap(self, rows: ListOf[int] | np.ndarray, device: Device) -> int:
        """What moving these rows, all on one device, takes off the free count of `device`."""
        if not len(rows):
            return 0
        source = self.allocators[self.devices[rows[0]]]
        return self.allocators[device].plan_receive(source, np.unique(self._owned(rows)))

    def swap(self, rows: ListOf[int] | np.ndarray, source: Device, target: Device) -> np.ndarray:
        """Move distinct rows from one device to the other; blocks they share move once.

        Returns:
            What to copy, (block on `source`, block on `target`), int64 [n, 2].

        Raises:
            NoFreeBlocksError: with nothing changed.
            ValueError: if a copy into one of the blocks is pending; with nothing changed.
        """
        giver, taker = self.allocators[source], self.allocators[target]
        owned = self._owned(rows)
        unique, new_ids, needs_copy = move_references(giver, taker, owned, len(rows) == 1)
        new_id_of = np.empty(giver.pool.num_blocks, dtype=np.int32)
        new_id_of[unique] = new_ids
        null_id = NO_BLOCK if taker.null_block_id is None else taker.null_block_id
        for row in rows:
            start, end = self.num_null[row], self.num_blocks[row]
            moved = new_id_of[self.block_tables[row, start:end]]
            self.block_tables[row, start:end] = moved
            self.block_tables[row, :start] = null_id
            taker.pool.prev_block[moved[:1]] = null_id if start else NO_BLOCK
            taker.pool.prev_block[moved[1:]] = moved[:-1]
            self.devices[row] = target
            self.room[row] = 0
        return np.stack([unique[needs_copy], new_ids[needs_copy]], axis=1).astype(np.int64)

    # -- marks, integrity, rows

    def mark_computed(self, rows: np.ndarray, num_computed_tokens: np.ndarray) -> None:
        """Mark the full blocks within each row's first tokens as computed.

        Blocks that were marked for a row before are not visited again, so a call after every step
        costs a few numpy calls.
        """
        ends = num_computed_tokens // self.block_size
        starts = self.num_marked[rows]
        behind = np.flatnonzero(ends > starts)
        if not len(behind):
            return
        rows, starts, ends = rows[behind], starts[behind], ends[behind]
        counts = ends - starts
        indices = np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())
        of_row = np.repeat(rows, counts)
        self.allocators[Device.GPU].mark_computed(self.block_tables[of_row, indices])
        self.num_marked[rows] = ends

    def num_empty_slots(self, rows: np.ndarray) -> int:
        """Slots without a token in the blocks of these rows; a shared block counts once."""
        lens = self.seq_lens[rows]
        empty = self.num_blocks[rows] * self.block_size - lens
        last = self.block_tables[rows, lens // self.block_size]
        partial = np.flatnonzero(empty)
        if len(partial) < 2:
            return int(empty.sum())
        order = np.sort(last[partial])
        if not np.count_nonzero(order[1:] == order[:-1]):
            return int(empty.sum())
        _, first = np.unique(last[partial], return_index=True)
        return int(empty[partial[first]].sum())

    def slot_mapping(self, row: int, start: int, end: int) -> np.ndarray:
        """The slots of token positions start to end, block_id * block_size + offset, int64.

        Raises:
            ValueError: for a position before the window, whose block was given up.
        """
        first = int(self.num_null[row]) * self.block_size
        if start < first:
            raise ValueError(f"start is {start}; the tokens before {first} are out of the window")
        positions = np.arange(start, end)
        block_ids = self.block_tables[row, positions // self.block_size].astype(np.int64)
        return block_ids * self.block_size + positions % self.block_size

    def check_integrity(self) -> None:
        """Raise AssertionError unless tables and pools agree."""
        for device, allocator in enumerate(self.allocators):
            rows = np.flatnonzero(self.devices == device)
            owned = self._owned(rows)
            assert owned.min(initial=0) >= 0, "a table has a hole"
            references = np.bincount(owned, minlength=allocator.pool.num_blocks)
            allocator.check_integrity(references)
            for row in rows.tolist():
                self._check_row(row, allocator)
        unused = np.arange(self.block_tables.shape[1]) >= self.num_blocks[:, None]
        assert (self.block_tables[unused] == NO_BLOCK).all(), "an unused entry is not -1"
        assert not self.num_blocks[self.devices == FREE_ROW].any(), "a free row has blocks"
        free_rows = sorted(self._free_rows)
        assert free_rows == np.flatnonzero(self.devices == FREE_ROW).tolist()

    def _check_row(self, row: int, allocator: NaiveBlockAllocator) -> None:
        pool, start = allocator.pool, int(self.num_null[row])
        block_ids = self.owned_block_ids(row)
        held = np.clip(
            self.seq_lens[row] - np.arange(start, self.num_blocks[row]) * self.block_size,
            0,
            self.block_size,
        )
        assert np.array_equal(pool.num_tokens[block_ids], held), "a table has lost tokens"
        if self.room[row]:
            last = self.block_tables[row, self.seq_lens[row] // self.block_size]
            offset = self.seq_lens[row] % self.block_size
            assert pool.ref_count[last] == 1, "a row would write a shared block"
            assert self.room[row] == self.block_size - offset
            assert self.next_slots[row] == last * self.block_size + offset
        assert (pool.depth[block_ids] == np.arange(start, self.num_blocks[row])).all()

    def _owned(self, rows: ListOf[int] | np.ndarray) -> np.ndarray:
        parts = [self.owned_block_ids(row) for row in rows]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def _take_row(self, width: int) -> int:
        self._ensure_width(width)
        if not self._free_rows:
            self._add_rows()
        return self._free_rows.pop()

    def _add_rows(self) -> None:
        count = len(self.devices)
        self.block_tables = np.vstack([self.block_tables, np.full_like(self.block_tables, -1)])
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self.devices[count:] = FREE_ROW
        self._free_rows = list(range(2 * count - 1, count - 1, -1))

    def _ensure_width(self, width: int) -> None:
        rows, have = self.block_tables.shape
        if width >= have:
            wider = np.full((rows, max(width + 1, 2 * have)), NO_BLOCK, dtype=np.int32)
            wider[:, :have] = self.block_tables
            self.block_tables = wider


_COLUMNS = (
    "seq_lens",
    "num_blocks",
    "num_null",
    "num_cached_tokens",
    "num_marked",
    "devices",
    "room",
    "next_slots",
    "roots",
)


class BlockTable:
    """The block table of one sequence: a view on a row of its allocator's `BlockTables`.

    Args:
        block_size: tokens a block, that of the allocator.
        block_allocator: whose blocks the table takes.
        _blocks: standalone blocks to take over, in order, all but the last one full; they belong
            to the table from then on.
        max_block_sliding_window: window // block_size + 1; blocks before the window are replaced
            by the null block when tokens are appended.

    Raises:
        ValueError: for another block size, or a window without a null block in the allocator.
    """

    def __init__(
        self,
        block_size: int,
        block_allocator: "CpuGpuBlockAllocator",
        _blocks: ListOf[Block] | None = None,
        max_block_sliding_window: int | None = None,
    ) -> None:
        if block_size != block_allocator.block_size:
            raise ValueError(
                f"block_size is {block_size!r}; the allocator has {block_allocator.block_size}"
            )
        gpu = block_allocator.allocator(Device.GPU)
        if max_block_sliding_window is not None and gpu.null_block_id is None:
            raise ValueError("a sliding window needs an allocator that reserves a null block")
        self._allocator = block_allocator
        self._tables: BlockTables = block_allocator.tables
        self._max_blocks = max_block_sliding_window
        self._row: int | None = None
        self._freed = False
        if _blocks:
            self._adopt(_blocks)

    @staticmethod
    def get_num_required_blocks(
        token_ids: ListOf[int] | np.ndarray, block_size: int, num_lookahead_slots: int = 0
    ) -> int:
        """Blocks that these tokens and lookahead slots need in an empty pool."""
        as_count("block_size", block_size, 1)
        as_count("num_lookahead_slots", num_lookahead_slots, 0)
        return -(-(len(token_ids) + num_lookahead_slots) // block_size)

    def allocate(
        self,
        token_ids: ListOf[int] | np.ndarray,
        device: Device = Device.GPU,
        extra_key: object = None,
    ) -> None:
        """Take the blocks for a sequence's first tokens.

        Raises:
            ValueError: if the table has blocks already or a token is out of range.
            NoFreeBlocksError: with nothing changed.
        """
        if self._row is not None or self._freed:
            raise ValueError("the table was allocated before")
        tokens = as_token_ids(token_ids)
        root = self._allocator.root(extra_key)
        self._row = self._tables.allocate(tokens, 0, device, root)

    def append_token_ids(
        self,
        token_ids: ListOf[int] | np.ndarray,
        num_lookahead_slots: int = 0,
        num_computed_slots: int | None = None,
    ) -> None:
        """Append tokens, taking new blocks and copies as needed.

        Args:
            token_ids: the tokens behind those that the table holds.
            num_lookahead_slots: empty slots wanted behind them.
            num_computed_slots: tokens whose KV is computed; with a sliding window, blocks that no
                later query reads are given up.

        Raises:
            ValueError: for a table that was freed, never allocated or swapped out, or for more
                computed slots than tokens.
            NoFreeBlocksError: with nothing changed.
        """
        row = self._live_row()
        self._require_gpu(row)
        tokens = as_token_ids(token_ids)
        if num_computed_slots is not None:
            as_count("num_computed_slots", num_computed_slots, 0)
            if num_computed_slots > self.num_full_slots + len(tokens):
                raise ValueError(
                    f"num_computed_slots is {num_computed_slots}; the table has "
                    f"{self.num_full_slots + len(tokens)} tokens"
                )
        rows = np.array([row])
        self._tables.append(rows, tokens, np.array([len(tokens)]), num_lookahead_slots)
        if self._max_blocks is not None and num_computed_slots is not None:
            self._tables.drop_before_window(rows, np.array([num_computed_slots]), self._max_blocks)

    def ensure_num_empty_slots(self, num_empty_slots: int) -> None:
        """Take blocks until that many slots are empty; on a table without blocks, too.

        Raises:
            NoFreeBlocksError: with nothing changed.
        """
        as_count("num_empty_slots", num_empty_slots, 0)
        fresh = self._row is None and not self._freed
        row = self._tables.open_row(Device.GPU, self._allocator.root(None)) if fresh else None
        if row is None:
            row = self._live_row()
            self._require_gpu(row)
        try:
            self._tables.append(
                np.array([row]), np.zeros(0, np.int32), np.zeros(1, np.int64), num_empty_slots
            )
        except NoFreeBlocksError:
            if fresh:
                self._tables.free([row])
            raise
        self._row = row

    def fork(self) -> "BlockTable":
        """Return a table that shares all blocks of this one."""
        other = BlockTable(
            self._allocator.block_size, self._allocator, max_block_sliding_window=self._max_blocks
        )
        other._row = int(self._tables.fork(self._live_row())[0])
        return other

    def free(self) -> None:
        """Give up all blocks, the last one first. Raises ValueError if freed before."""
        self._tables.free([self._live_row()])
        self._row, self._freed = None, True

    @property
    def physical_block_ids(self) -> list[int]:
        """The ids of the blocks on their device, in order."""
        return [] if self._row is None else self._tables.block_ids(self._row).tolist()

    @property
    def blocks(self) -> list[Block]:
        """Read-only views on the blocks, in order, null blocks left out."""
        if self._row is None:
            return []
        allocator = self._allocator.allocator(self.device)
        views: list[Block] = []
        for block_id in self._tables.owned_block_ids(self._row).tolist():
            views.append(allocator.view(block_id, views[-1] if views else None))
        return views

    @property
    def device(self) -> Device:
        """Where the blocks lie."""
        return Device(int(self._tables.devices[self._live_row()]))

    @property
    def num_full_slots(self) -> int:
        """Tokens in the table."""
        return 0 if self._row is None else int(self._tables.seq_lens[self._row])

    def get_unseen_token_ids(self, sequence_token_ids: ListOf[int] | np.ndarray) -> np.ndarray:
        """Return the tokens of the sequence that the table does not hold yet, int32 [n]."""
        return as_token_ids(sequence_token_ids)[self.num_full_slots :]

    def get_num_blocks_touched_by_append_slots(
        self, token_ids: ListOf[int] | np.ndarray, num_lookahead_slots: int
    ) -> int:
        """Blocks, present or new, that hold the slots of these tokens and lookahead slots."""
        count = len(token_ids) + as_count("num_lookahead_slots", num_lookahead_slots, 0)
        if not count:
            return 0
        start, block_size = self.num_full_slots, self._allocator.block_size
        return -(-(start + count) // block_size) - start // block_size

    def _live_row(self) -> int:
        if self._row is None:
            raise ValueError(
                "the block table was freed" if self._freed else "the block table has no blocks yet"
            )
        return self._row

    def _require_gpu(self, row: int) -> None:
        if self._tables.devices[row] != Device.GPU:
            raise ValueError("the block table is swapped out; only tables on the GPU can grow")

    def _adopt(self, blocks: ListOf[Block]) -> None:
        allocator = blocks[0]._allocator
        if allocator not in self._tables.allocators:
            raise ValueError("the blocks of a table are those of its allocator")
        if any(block._read_only or block.block_id is None for block in blocks):
            raise ValueError("a block table takes over standalone blocks only")
        if not all(block.is_full for block in blocks[:-1]):
            raise ValueError("all blocks of a table but the last must be full")
        block_ids = np.array([block.block_id for block in blocks], dtype=np.int32)
        previous = allocator.pool.prev_block[block_ids]
        if any(block._allocator is not allocator for block in blocks) or previous.tolist() != [
            NO_BLOCK,
            *block_ids[:-1].tolist(),
        ]:
            raise ValueError("the blocks of a table are one chain, from its first block on")
        row = self._tables.open_row(allocator.device, self._allocator.root(blocks[0]._extra_key))
        self._tables.set_blocks(row, block_ids)
        for block in blocks:
            block._read_only = True
        self._row = row


class _Move(NamedTuple):
    source_ids: np.ndarray  # int32 [n], distinct, in order of first appearance
    target_ids: np.ndarray  # int32 [n]
    needs_copy: np.ndarray  # bool [n]


def move_references(
    giver: NaiveBlockAllocator,
    taker: NaiveBlockAllocator,
    block_ids: np.ndarray,
    distinct: bool = False,
) -> _Move:
    """Move references (an id may appear several times) from one device's blocks to the other's.

    `distinct` says that no id appears twice, which is faster.

    Raises:
        NoFreeBlocksError: with nothing changed.
        ValueError: if a copy into one of the blocks is pending, or one appears more often than it
            has references; with nothing changed.
    """
    if distinct:
        unique, counts = block_ids, np.ones(len(block_ids), dtype=np.int32)
    else:
        unique, first, counts = np.unique(block_ids, return_index=True, return_counts=True)
        order = np.argsort(first)
        unique, counts = unique[order], counts[order].astype(np.int32)
    if np.count_nonzero(giver.pool.ref_count[unique] < counts):
        raise ValueError("a block appears more often than it has references")
    if len(giver.copy_on_writes):
        pending = set(giver.copy_on_writes.destinations()) & set(unique.tolist())
        if pending:
            raise ValueError(
                f"copies into blocks {sorted(pending)} are pending; drain them before a swap"
            )
    new_ids, needs_copy = taker.receive(giver, unique, counts)
    giver.release(block_ids[::-1], distinct)
    return _Move(unique, new_ids, needs_copy)
