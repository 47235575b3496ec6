"""What an eviction policy is: it sees cached contents come, be hit and go, and names victims.

A policy knows contents by integer keys: content hashes in an allocator, block ids of a trace in a
simulation. A block in use is *pinned*: it stays where it is in the policy's queues, and when an
eviction meets it there it is *parked*, put aside until it is released, so that no later eviction
meets it again. Each operation costs amortised O(1), or O(log n) where ranks are kept in order.
"""

import bisect
import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, ClassVar

POLICIES: dict[str, type["Policy"]] = {}
"""By name: every subclass of `Policy` that has one."""

NEVER = 1 << 62
Queue = OrderedDict[int, None]
"""Keys from the first to leave to the last."""


class Future:
    """When each key is used: what an offline policy knows.

    Attributes:
        now: the time of the use that is being served; set by who replays the uses.
    """

    def __init__(self, uses: Iterable[Iterable[int]]) -> None:
        """`uses` are the keys used at time 0, 1, and so on."""
        self.now = -1
        self._times: dict[int, list[int]] = {}
        for time, keys in enumerate(uses):
            for key in keys:
                self._times.setdefault(key, []).append(time)

    def next_use(self, key: int) -> int:
        """The time of the first use of a key after `now`, or NEVER."""
        times = self._times.get(key, ())
        i = bisect.bisect_right(times, self.now)
        return times[i] if i < len(times) else NEVER


class Policy(ABC):
    """An order in which up to `capacity` keys are evicted.

    Args:
        capacity: keys that the cache holds, at least 1.
        block_size: tokens a block, for policies that weigh positions.
        future: for offline policies only.

    Class attributes of a subclass:
        name: what configurations call it.
        evictor_type: an `Evictor` that does the same on arrays, if there is one.
    """

    name: ClassVar[str]
    evictor_type: ClassVar[type | None] = None

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            POLICIES[cls.name] = cls

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        self.capacity = capacity
        self._pinned: set[int] = set()
        self._parked: dict[int, tuple[int, Any]] = {}  # by order of parking
        self._num_parked = 0

    @abstractmethod
    def insert(self, key: int, depth: int = 0) -> None:
        """A key that is not cached enters; `depth` is its block's index in its sequence."""

    @abstractmethod
    def hit(self, key: int) -> None:
        """A cached key is used again."""

    @abstractmethod
    def evict(self, incoming: int | None = None) -> int:
        """Choose a key that is not pinned, forget it and return it.

        `incoming` is the key that takes its place, where that is known. At least one key is not
        pinned.
        """

    @abstractmethod
    def forget(self, key: int) -> None:
        """A key that is not pinned leaves the cache without being evicted."""

    def pin(self, keys: Iterable[int]) -> None:
        """These keys, not pinned before, must not be evicted."""
        self._pinned.update(keys)

    def unpin(self, keys: list[int]) -> None:
        """These pinned keys may be evicted again; those of one sequence come last block first."""
        self._pinned.difference_update(keys)
        if self._parked:
            parked = [(self._parked.pop(key), key) for key in keys if key in self._parked]
            # The first that was parked is restored last, and so comes first again.
            for (_, place), key in sorted(parked, key=lambda item: -item[0][0]):
                self._restore(key, place)

    def _park(self, key: int, place: Any) -> None:
        """Put a pinned key aside that was taken from `place`."""
        self._num_parked += 1
        self._parked[key] = (self._num_parked, place)

    def _restore(self, key: int, place: Any) -> None:
        """Put a key that was parked with `place` where the next eviction looks first."""
        place[key] = None
        place.move_to_end(key, last=False)

    def _pop(self, queue: Queue) -> int | None:
        """Remove and return the first key that is not pinned; park those before it."""
        while queue:
            key, _ = queue.popitem(last=False)
            if key not in self._pinned:
                return key
            self._park(key, queue)
        return None


class RankQueue:
    """Keys by rank, the lowest first; keys of one rank in the order in which they were pushed.

    A heap orders the ranks, a queue the keys of one rank, so a push or pop costs O(log r) for r
    different ranks. A rank whose queue is empty stays in the heap until it comes up, or until half
    of the heap is such.
    """

    def __init__(self) -> None:
        self._queues: dict[float, Queue] = {}
        self._heap: list[float] = []
        self._ranks: dict[int, float] = {}

    def push(self, key: int, rank: float) -> None:
        """Enter a key, or move it behind the others of a rank."""
        if key in self._ranks:
            self.discard(key)
        self._ranks[key] = rank
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = OrderedDict()
            heapq.heappush(self._heap, rank)
            if len(self._heap) > 2 * len(self._queues) + 64:
                self._heap = sorted(self._queues)
        queue[key] = None

    def pop(self) -> tuple[int, float]:
        """Remove the first key and return it with its rank."""
        while (rank := self._heap[0]) not in self._queues:
            heapq.heappop(self._heap)
        queue = self._queues[rank]
        key, _ = queue.popitem(last=False)
        del self._ranks[key]
        if not queue:
            del self._queues[rank]
        return key, rank

    def discard(self, key: int) -> None:
        """Remove a key if it is there."""
        rank = self._ranks.pop(key, None)
        if rank is not None:
            queue = self._queues[rank]
            del queue[key]
            if not queue:
                del self._queues[rank]


class RankedPolicy(Policy):
    """Evicts the key of the lowest rank, of these the one whose rank was set first."""

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        super().__init__(capacity, block_size, future)
        self._queue = RankQueue()
        self._uses: dict[int, int] = {}
        self._depths: dict[int, int] = {}

    @abstractmethod
    def rank(self, key: int, uses: int, depth: int) -> float:
        """The rank of a key that was used `uses` times while cached and is used again now."""

    def evicted(self, rank: float) -> None:
        """A key of this rank was evicted; called for policies that age."""

    def insert(self, key: int, depth: int = 0) -> None:
        self._uses[key] = 1
        self._depths[key] = depth
        self._queue.push(key, self.rank(key, 1, depth))

    def hit(self, key: int) -> None:
        uses = self._uses[key] = self._uses[key] + 1
        self._parked.pop(key, None)
        self._queue.push(key, self.rank(key, uses, self._depths[key]))

    def evict(self, incoming: int | None = None) -> int:
        key, rank = self._queue.pop()
        while key in self._pinned:
            self._park(key, rank)
            key, rank = self._queue.pop()
        del self._uses[key], self._depths[key]
        self.evicted(rank)
        return key

    def forget(self, key: int) -> None:
        del self._uses[key], self._depths[key]
        self._queue.discard(key)

    def _restore(self, key: int, place: float) -> None:
        self._queue.push(key, place)
