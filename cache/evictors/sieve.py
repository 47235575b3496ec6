"""SIEVE: a hand sweeps the queue from old to new and takes what was not hit since its last visit.

Y. Zhang et al., "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web
caches", NSDI 2024.
"""

from collections import OrderedDict

from .policy import Future, Policy, Queue


class Sieve(Policy):
    """Unlike CLOCK, keys that are spared stay where they are, and new ones enter at the new end.

    The hand stands between two queues: `_behind` it, older, the keys that it has spared in this
    sweep; `_ahead`, those that it will come to. Each is in order of insertion.
    """

    name = "sieve"

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        super().__init__(capacity, block_size, future)
        self._ahead: Queue = OrderedDict()
        self._behind: Queue = OrderedDict()
        self._visited: set[int] = set()

    def insert(self, key: int, depth: int = 0) -> None:
        self._ahead[key] = None

    def hit(self, key: int) -> None:
        self._visited.add(key)

    def evict(self, incoming: int | None = None) -> int:
        while (key := self._next()) in self._visited:
            self._visited.remove(key)
            self._behind[key] = None
        self._wrap()
        return key

    def _next(self) -> int:
        """Take out the key at the hand, and move the hand on."""
        while (key := self._pop(self._ahead)) is None:
            self._wrap()
        return key

    def _wrap(self) -> None:
        """From the new end the hand goes back to the oldest key, before others are inserted."""
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead

    def forget(self, key: int) -> None:
        self._ahead.pop(key, None)
        self._behind.pop(key, None)
        self._visited.discard(key)

    def _restore(self, key: int, place: Queue) -> None:
        # The queues change roles, so `place` says nothing: just ahead of the hand.
        super()._restore(key, self._ahead)
