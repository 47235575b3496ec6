"""LRU: the longest unused block goes first.

R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal, 1970.
"""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from .policy import Future, Policy, Queue
from .ranked import RankedEvictor


class LRUEvictor(RankedEvictor):
    """Goes by `last_accessed`; of one sequence, the suffix before its prefix."""

    def rank(self, block_ids: np.ndarray) -> np.ndarray:
        return self._pool.last_accessed[block_ids]


class LRU(Policy):
    """Evicts the key that was used last the longest ago; a pinned key is used until it is unpinned.

    So pinned keys are in no queue at all.
    """

    name = "lru"
    evictor_type = LRUEvictor

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        super().__init__(capacity, block_size, future)
        self._queue: Queue = OrderedDict()

    def insert(self, key: int, depth: int = 0) -> None:
        self._queue[key] = None

    def hit(self, key: int) -> None:
        if key in self._queue:
            self._queue.move_to_end(key)

    def evict(self, incoming: int | None = None) -> int:
        return self._queue.popitem(last=False)[0]

    def forget(self, key: int) -> None:
        del self._queue[key]

    def pin(self, keys: Iterable[int]) -> None:
        for key in keys:
            del self._queue[key]

    def unpin(self, keys: list[int]) -> None:
        for key in keys:
            self._queue[key] = None
