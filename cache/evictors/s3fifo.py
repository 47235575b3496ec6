"""S3-FIFO: a small queue in which blocks must be hit to enter the main queue, and a ghost queue.

J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from collections import OrderedDict

from .policy import Future, Policy, Queue

SMALL_SHARE = 0.1
MAX_HITS = 3


class S3FIFO(Policy):
    """Small and main queue share the capacity 1 to 9; the ghost queue remembers as many as main.

    A key that leaves the small queue goes to main if it was hit more than once, else it is evicted
    and remembered. A remembered key enters main at once. Main is a FIFO with as many further
    chances as there were hits, at most three.
    """

    name = "s3fifo"

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        super().__init__(capacity, block_size, future)
        self._small_size = max(1, int(SMALL_SHARE * capacity))
        self._main_size = max(1, capacity - self._small_size)
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghosts: Queue = OrderedDict()
        self._hits: dict[int, int] = {}

    def insert(self, key: int, depth: int = 0) -> None:
        self._hits[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def hit(self, key: int) -> None:
        if self._hits[key] < MAX_HITS:
            self._hits[key] += 1

    def evict(self, incoming: int | None = None) -> int:
        victim = None
        while victim is None:
            if len(self._small) >= self._small_size or not self._main:
                victim = self._evict_small()
            else:
                victim = self._evict_main()
        del self._hits[victim]
        return victim

    def _evict_small(self) -> int | None:
        """Look through the small queue; where a promotion overfills main, evict from there."""
        while (key := self._pop(self._small)) is not None:
            if self._hits[key] <= 1:
                self._remember(key)
                return key
            self._hits[key] = 0
            self._main[key] = None
            if len(self._main) > self._main_size:
                return self._evict_main()
        return None

    def _evict_main(self) -> int | None:
        while (key := self._pop(self._main)) is not None:
            if not self._hits[key]:
                return key
            self._hits[key] -= 1
            self._main[key] = None
        return None

    def _remember(self, key: int) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > self._main_size:
            self._ghosts.popitem(last=False)

    def forget(self, key: int) -> None:
        del self._hits[key]
        self._small.pop(key, None)
        self._main.pop(key, None)
