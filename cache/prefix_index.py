"""PrefixIndex: content hash -> block id, an open-addressing table in two arrays.

A bucket is a line of 8 entries. A hash's home bucket is its top bits; an entry goes into the first
bucket from home on (cyclically) that has room, and a lookup stops at the first bucket with a free
entry. Removing from a full bucket pulls displaced entries back, so there are no tombstones and
lookups stay short for ever. The same two arrays, copied to a GPU, can be probed there: one bucket
is one 64-byte load.
"""

from typing import NamedTuple

import numpy as np

BUCKET_SIZE = 8
EMPTY = 0
"""The key of a free entry. A block whose content hash is 0 (one in 2^64) is never indexed."""


class IndexChanges(NamedTuple):
    """Entries of the table that changed: what a copy elsewhere must be told."""

    slots: np.ndarray  # int64 [n]: bucket * 8 + entry, distinct, ascending
    keys: np.ndarray  # int64 [n]
    block_ids: np.ndarray  # int32 [n]


class _Found(NamedTuple):
    """Where hashes are."""

    slots: np.ndarray  # int64 [n], -1 for a hash that isn't in the table
    home_rows: np.ndarray  # int64 [n, 8], the keys of each one's home bucket
    num_missing: int


class PrefixIndex:
    """A map from content hash to block id for at most `capacity` hashes.

    Attributes:
        keys: int64 [num_buckets, 8]; EMPTY where free. num_buckets is a power of two.
        block_ids: int32 [num_buckets, 8]; meaningful only beside a key.
        shift: the home bucket of a hash is `uint64(hash) >> shift`; for one bucket, 0.
    """

    def __init__(self, capacity: int, track_changes: bool = False) -> None:
        # A load below a quarter keeps full buckets, the slow case, below one in a thousand.
        bucket_bits = max(1, (4 * capacity // BUCKET_SIZE).bit_length())
        self.num_buckets = 1 << bucket_bits
        self.shift = 64 - bucket_bits
        self.keys = np.zeros((self.num_buckets, BUCKET_SIZE), dtype=np.int64)
        self.block_ids = np.zeros((self.num_buckets, BUCKET_SIZE), dtype=np.int32)
        self._flat_keys = self.keys.ravel()
        self._flat_ids = self.block_ids.ravel()
        self._shift = np.uint64(self.shift)
        self._size = 0
        self._changed: list[np.ndarray] | None = [] if track_changes else None

    def __len__(self) -> int:
        return self._size

    def lookup(self, hashes: np.ndarray) -> np.ndarray:
        """Return the block id of each hash, int32 [n], or -1. `hashes` is int64 [n]."""
        slots, _, num_missing = self._find(hashes)
        block_ids = self._flat_ids.take(slots)
        if num_missing:
            block_ids[slots < 0] = -1
        return block_ids

    def insert(self, hashes: np.ndarray, block_ids: np.ndarray) -> None:
        """Add entries. The hashes are distinct and not in the table; EMPTY is skipped."""
        if np.count_nonzero(hashes) < len(hashes):
            kept = hashes != EMPTY
            hashes, block_ids = hashes[kept], block_ids[kept]
        self._size += len(hashes)
        buckets = self._home(hashes)
        while len(hashes):
            entries = (self.keys.take(buckets, axis=0) == EMPTY).argmax(axis=1)
            slots = buckets * BUCKET_SIZE + entries
            free = self._flat_keys.take(slots) == EMPTY
            if np.count_nonzero(free) < len(free):
                self._flat_keys[slots[free]] = hashes[free]
            else:
                self._flat_keys[slots] = hashes
            # Two hashes may have chosen one entry: the last one written has it, the others go on.
            placed = self._flat_keys.take(slots) == hashes
            if np.count_nonzero(placed) == len(placed):
                self._flat_ids[slots] = block_ids
                self._note(slots)
                return
            self._flat_ids[slots[placed]] = block_ids[placed]
            self._note(slots[placed])
            buckets = np.where(free, buckets, (buckets + 1) & (self.num_buckets - 1))[~placed]
            hashes, block_ids = hashes[~placed], block_ids[~placed]

    def remove(self, hashes: np.ndarray) -> None:
        """Remove entries. The hashes are distinct; those not in the table are passed over."""
        slots, home_rows, num_missing = self._find(hashes)
        beside_full = _full(home_rows)
        missing = slots < 0
        if num_missing:
            beside_full = beside_full[~missing[beside_full]]
        # Only where the home bucket is full can an entry be displaced, or have displaced others.
        if len(beside_full):
            has_displaced = self._has_displaced(hashes[beside_full], slots[beside_full])
            for i in beside_full[has_displaced]:
                self._remove_one(hashes[i : i + 1])
                missing[i] = True
        if np.count_nonzero(missing):
            slots = slots[~missing]
        self._flat_keys[slots] = EMPTY
        self._size -= len(slots)
        self._note(slots)

    def clear(self) -> None:
        """Remove every entry."""
        if self._changed is not None:
            self._note(np.flatnonzero(self._flat_keys))
        self.keys.fill(EMPTY)
        self._size = 0

    def drain_changes(self) -> IndexChanges:
        """Return and forget what changed since the last call, for a table built with tracking.

        Raises:
            ValueError: if the table does not track changes.
        """
        if self._changed is None:
            raise ValueError("this PrefixIndex was built with track_changes=False")
        slots = np.unique(np.concatenate([np.zeros(0, np.int64), *self._changed]))
        self._changed = []
        return IndexChanges(slots, self._flat_keys[slots], self._flat_ids[slots])

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all (hashes int64, block ids int32), in table order."""
        slots = np.flatnonzero(self._flat_keys)
        return self._flat_keys[slots], self._flat_ids[slots]

    def _home(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes.view(np.uint64) >> self._shift).view(np.int64)

    def _find(self, hashes: np.ndarray) -> _Found:
        buckets = self._home(hashes)
        home_rows = rows = self.keys.take(buckets, axis=0)
        slots = buckets * BUCKET_SIZE + (rows == hashes[:, None]).argmax(axis=1)
        found = self._flat_keys.take(slots) == hashes
        if np.count_nonzero(hashes) < len(hashes):
            found &= hashes != EMPTY
        if np.count_nonzero(found) == len(found):
            return _Found(slots, home_rows, 0)
        missed = ~found
        slots[missed] = -1
        # A miss is final where its bucket has a free entry; elsewhere the next bucket may hold it.
        open_ = _full(rows)
        open_ = open_[missed[open_]]
        while len(open_):
            buckets[open_] = (buckets[open_] + 1) & (self.num_buckets - 1)
            rows = self.keys.take(buckets[open_], axis=0)
            candidates = buckets[open_] * BUCKET_SIZE + (rows == hashes[open_, None]).argmax(axis=1)
            found = self._flat_keys.take(candidates) == hashes[open_]
            slots[open_[found]] = candidates[found]
            missed = np.flatnonzero(~found)
            open_ = open_[missed[_full(rows[missed])]]
        return _Found(slots, home_rows, int(np.count_nonzero(slots < 0)))

    def _has_displaced(self, hashes: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Whether a full home bucket may have entries elsewhere, or lost this one, bool [n]."""
        homes = self._home(hashes)
        following = (homes + 1) & (self.num_buckets - 1)
        rows = self.keys[following]
        strangers = (rows != EMPTY) & (self._home(rows) != following[:, None])
        return strangers.any(axis=1) | (rows != EMPTY).all(axis=1) | (slots // BUCKET_SIZE != homes)

    def _remove_one(self, hash_: np.ndarray) -> None:
        """Remove an entry, and pull displaced ones back if its bucket is full."""
        hole = int(self._find(hash_).slots[0])
        was_full = self.keys[hole // BUCKET_SIZE].all()
        self._flat_keys[hole] = EMPTY
        self._size -= 1
        self._note(np.array([hole]))
        if was_full:
            self._pull_back(hole)

    def _pull_back(self, hole: int) -> None:
        """Move displaced entries into a hole in a bucket that was full, and so on behind them."""
        bucket = hole // BUCKET_SIZE
        distance = 0
        while True:
            distance += 1
            probe = (bucket + distance) & (self.num_buckets - 1)
            row = self.keys[probe]
            was_full = bool(row.all())
            displacement = (probe - self._home(row)) & (self.num_buckets - 1)
            movable = np.flatnonzero((row != EMPTY) & (displacement >= distance))
            if len(movable):
                source = probe * BUCKET_SIZE + int(movable[0])
                self._flat_keys[hole] = self._flat_keys[source]
                self._flat_ids[hole] = self._flat_ids[source]
                self._flat_keys[source] = EMPTY
                self._note(np.array([source]))
                hole, bucket, distance = source, probe, 0
            if not was_full:
                return

    def _note(self, slots: np.ndarray) -> None:
        if self._changed is not None:
            self._changed.append(slots)


def _full(rows: np.ndarray) -> np.ndarray:
    """Return the indices of the buckets without a free entry, given keys int64 [n, 8]."""
    if not np.count_nonzero(rows[:, -1]):
        return np.zeros(0, dtype=np.int64)
    candidates = np.flatnonzero(rows[:, -1])
    return candidates[rows[candidates].all(axis=1)]
