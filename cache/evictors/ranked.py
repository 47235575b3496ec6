"""Evictors whose order is a rank and the depth in the chain: whole sequences move at once."""

import heapq

import numpy as np

from ..block_pool import BlockPool

_MAX_DEPTH = 0x7FFFFFFF
_ID_BITS = np.int64(32)
_ID_MASK = np.int64(0xFFFFFFFF)


class _Run:
    """Codes in ascending order; those before `start` are spent. Live where the stamp is current."""

    __slots__ = ("codes", "stamp", "start")

    def __init__(self, codes: np.ndarray, stamp: int) -> None:
        self.codes = codes
        self.stamp = stamp
        self.start = 0


class RankedEvictor:
    """Evicts by (rank, deepest in its chain first, lowest id). A subclass gives the rank.

    Blocks of one rank form a group: sorted runs of codes that order by depth and id. Groups wait in
    a heap. A removed block stays in its run and is passed over, being recognised by its stamp; once
    more than half of all entries are such, they are swept out. So each operation costs amortised
    O(log n) a block, and blocks that are freed together move together in a few numpy calls.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._stamps = np.zeros(pool.num_blocks, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        self._stamps.fill(0)
        self._next_stamp = 1
        self._groups: dict[float, list[_Run]] = {}
        self._heap: list[float] = []
        self._size = 0
        self._num_entries = 0

    def __len__(self) -> int:
        return self._size

    def rank(self, block_ids: np.ndarray) -> np.ndarray:
        """The rank of each block, float64 or int64 [n]; the lowest is evicted first."""
        raise NotImplementedError

    def on_cached(self, block_ids: np.ndarray) -> None:
        """Ranks that don't need it ignore it."""

    def on_hit(self, block_ids: np.ndarray) -> None:
        """Likewise."""

    def on_dropped(self, block_ids: np.ndarray) -> None:
        """Likewise."""

    def on_uncached(self, block_ids: np.ndarray) -> None:
        """Likewise."""

    def add(self, block_ids: np.ndarray) -> None:
        if not len(block_ids):
            return
        ranks = self.rank(block_ids)
        codes = ((_MAX_DEPTH - self._pool.depth[block_ids]).astype(np.int64) << _ID_BITS) | (
            block_ids
        )
        first = ranks[0]
        if (ranks == first).all():
            self._add_run(float(first), codes)
        else:
            order = np.argsort(ranks, kind="stable")
            ranks, codes = ranks[order], codes[order]
            cuts = np.flatnonzero(ranks[1:] != ranks[:-1]) + 1
            for part_rank, part in zip(
                ranks[np.r_[0, cuts]].tolist(), np.split(codes, cuts), strict=True
            ):
                self._add_run(part_rank, part)
        self._size += len(block_ids)
        if self._num_entries > 2 * self._size + 1024:
            self._sweep()

    def remove(self, block_ids: np.ndarray) -> None:
        self._stamps[block_ids] = 0
        self._size -= len(block_ids)

    def evict(self, count: int, incoming: np.ndarray | None = None) -> np.ndarray:
        victims = [np.zeros(0, dtype=np.int32)] if not count else []
        missing = count
        while missing:
            rank = self._heap[0]
            part = self._evict_from(self._groups[rank], missing)
            if not self._groups[rank]:
                heapq.heappop(self._heap)
                del self._groups[rank]
            victims.append(part)
            missing -= len(part)
        block_ids = np.concatenate(victims) if len(victims) > 1 else victims[0]
        self._stamps[block_ids] = 0
        self._size -= count
        return block_ids

    def block_ids(self) -> np.ndarray:
        return np.flatnonzero(self._stamps).astype(np.int32)

    def _add_run(self, rank: float, codes: np.ndarray) -> None:
        codes = np.sort(codes)
        runs = self._groups.get(rank)
        if runs is None:
            runs = self._groups[rank] = []
            heapq.heappush(self._heap, rank)
        runs.append(self._stamped(codes))
        # Runs of at least doubling length: a block is merged O(log n) times.
        while len(runs) > 1 and len(runs[-2].codes) < 2 * len(runs[-1].codes):
            last, before = runs.pop(), runs.pop()
            merged = np.sort(np.concatenate([self._live(before), self._live(last)]))
            runs.append(self._stamped(merged))

    def _stamped(self, codes: np.ndarray) -> _Run:
        stamp = self._next_stamp
        self._next_stamp += 1
        self._stamps[codes & _ID_MASK] = stamp
        self._num_entries += len(codes)
        return _Run(codes, stamp)

    def _live(self, run: _Run) -> np.ndarray:
        """Take a run apart: return its live codes."""
        codes = run.codes[run.start :]
        self._num_entries -= len(codes)
        return codes[self._stamps[codes & _ID_MASK] == run.stamp]

    def _evict_from(self, runs: list[_Run], count: int) -> np.ndarray:
        """Return up to `count` first live ids of a group, and drop its spent runs."""
        windows = [run.codes[run.start : run.start + count] for run in runs]
        # Nothing behind the shortest window's end may be overtaken.
        ends = [
            window[-1]
            for run, window in zip(runs, windows, strict=True)
            if run.start + len(window) < len(run.codes)
        ]
        live = [
            window[self._stamps[window & _ID_MASK] == run.stamp]
            for run, window in zip(runs, windows, strict=True)
        ]
        codes = np.sort(np.concatenate(live)) if len(live) > 1 else live[0]
        if ends:
            codes = codes[: np.searchsorted(codes, min(ends), side="right")]
        codes = codes[:count]
        limit = codes[-1] if len(codes) == count else (min(ends) if ends else None)
        for run, window in zip(runs, windows, strict=True):
            spent = (
                len(window) if limit is None else int(np.searchsorted(window, limit, side="right"))
            )
            run.start += spent
            self._num_entries -= spent
        runs[:] = [run for run in runs if run.start < len(run.codes)]
        return (codes & _ID_MASK).astype(np.int32)

    def _sweep(self) -> None:
        groups = self._groups
        self._groups, self._heap, self._num_entries = {}, [], 0
        for rank, runs in groups.items():
            codes = np.concatenate([self._live(run) for run in runs])
            if len(codes):
                self._groups[rank] = [self._stamped(np.sort(codes))]
                self._heap.append(rank)
        heapq.heapify(self._heap)
        self._num_entries = self._size
