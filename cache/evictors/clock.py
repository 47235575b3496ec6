"""CLOCK: FIFO with a second chance for blocks that were hit.

F. J. Corbató, "A paging experiment with the Multics system", MIT Project MAC, 1968.
"""

from collections import OrderedDict

from .policy import Future, Policy, Queue


class Clock(Policy):
    """A key that was hit since it was looked at last goes to the end of the queue, once."""

    name = "clock"

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        super().__init__(capacity, block_size, future)
        self._queue: Queue = OrderedDict()
        self._visited: set[int] = set()

    def insert(self, key: int, depth: int = 0) -> None:
        self._queue[key] = None

    def hit(self, key: int) -> None:
        self._visited.add(key)

    def evict(self, incoming: int | None = None) -> int:
        while (key := self._pop(self._queue)) in self._visited:
            self._visited.remove(key)
            self._queue[key] = None
        return key

    def forget(self, key: int) -> None:
        del self._queue[key]
        self._visited.discard(key)
