"""FIFO: the block that entered the cache first goes first, however often it was hit since."""

import heapq
from collections import OrderedDict

import numpy as np

from .policy import Future, Policy, Queue
from .ranked import RankedEvictor


class FIFOEvictor(RankedEvictor):
    """Blocks that entered together go deepest first."""

    def clear(self) -> None:
        super().clear()
        self._cached_at = np.zeros(self._pool.num_blocks, dtype=np.int64)
        self._batches = 0

    def rank(self, block_ids: np.ndarray) -> np.ndarray:
        return self._cached_at[block_ids]

    def on_cached(self, block_ids: np.ndarray) -> None:
        self._batches += 1
        self._cached_at[block_ids] = self._batches

    def on_uncached(self, block_ids: np.ndarray) -> None:
        self.on_cached(block_ids)


class FIFO(Policy):
    """Evicts the key that was inserted first.

    Keys that were parked are older than all in the queue; they come back by age.
    """

    name = "fifo"
    evictor_type = FIFOEvictor

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        super().__init__(capacity, block_size, future)
        self._queue: Queue = OrderedDict()
        self._older: list[tuple[int, int]] = []  # a heap of (age number, key)
        self._num_popped = 0

    def insert(self, key: int, depth: int = 0) -> None:
        self._queue[key] = None

    def hit(self, key: int) -> None:
        pass

    def evict(self, incoming: int | None = None) -> int:
        while self._older:
            number, key = heapq.heappop(self._older)
            if key not in self._pinned:
                return key
            self._park(key, number)
        while (key := self._queue.popitem(last=False)[0]) in self._pinned:
            self._num_popped += 1
            self._park(key, self._num_popped)
        return key

    def forget(self, key: int) -> None:
        if key in self._queue:
            del self._queue[key]
            return
        self._older = [entry for entry in self._older if entry[1] != key]
        heapq.heapify(self._older)

    def _restore(self, key: int, place: int) -> None:
        heapq.heappush(self._older, (place, key))
