"""W-TinyLFU: a newcomer replaces a block of the main cache only if it was used more often.

G. Einziger, R. Friedman and B. Manes, "TinyLFU: a highly efficient cache admission policy", ACM
Transactions on Storage, 2017.
"""

from collections import OrderedDict

from .policy import Future, Policy, Queue

WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
MAX_COUNT = 15
SAMPLE_SIZE = 10
"""Uses a block of capacity after which all counts are halved."""

_MASK = (1 << 64) - 1
_MIX = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
_HALVED = bytes(count >> 1 for count in range(256))


class FrequencySketch:
    """Estimates how often keys were used: a count-min sketch of four rows, halved now and then."""

    def __init__(self, capacity: int) -> None:
        bits = max(4, (2 * capacity - 1).bit_length())
        self._shift = 64 - bits
        self._rows = [bytearray(1 << bits) for _ in range(4)]
        self._sample_size = SAMPLE_SIZE * capacity
        self._num_recorded = 0

    def record(self, key: int) -> None:
        """Count a use; only the counts that are lowest grow."""
        places = self._places(key)
        counts = [row[place] for row, place in zip(self._rows, places, strict=True)]
        lowest = min(counts)
        if lowest < MAX_COUNT:
            for row, place, count in zip(self._rows, places, counts, strict=True):
                if count == lowest:
                    row[place] = lowest + 1
        self._num_recorded += 1
        if self._num_recorded >= self._sample_size:
            self._rows = [row.translate(_HALVED) for row in self._rows]
            self._num_recorded //= 2

    def estimate(self, key: int) -> int:
        """The count of a key: never too low since the last halving, at most MAX_COUNT."""
        a, b, c, d = self._places(key)
        first, second, third, fourth = self._rows
        return min(first[a], second[b], third[c], fourth[d])

    def _places(self, key: int) -> tuple[int, int, int, int]:
        one = key * _MIX[0] & _MASK
        other = (one ^ (one >> 32)) * _MIX[1] & _MASK
        shift = self._shift
        return (
            one >> shift,
            other >> shift,
            (one + other & _MASK) >> shift,
            (one + 2 * other & _MASK) >> shift,
        )


class WTinyLFU(Policy):
    """An LRU window of 1 % before a main cache in two LRU segments, 20 % probation, 80 % protected.

    What leaves the window is the candidate, the first of probation the victim: of the two the one
    with the higher estimate stays, in a tie the victim.
    """

    name = "wtinylfu"

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        super().__init__(capacity, block_size, future)
        self._window_size = max(1, int(WINDOW_SHARE * capacity))
        self._protected_size = int(PROTECTED_SHARE * (capacity - self._window_size))
        self._window: Queue = OrderedDict()
        self._probation: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()
        self._sketch = FrequencySketch(capacity)

    def insert(self, key: int, depth: int = 0) -> None:
        self._sketch.record(key)
        self._window[key] = None
        if len(self._window) > self._window_size:
            self._probation[self._window.popitem(last=False)[0]] = None

    def hit(self, key: int) -> None:
        self._sketch.record(key)
        if key in self._parked:
            self._parked.pop(key)[1][key] = None
        if key in self._window:
            self._window.move_to_end(key)
        elif key in self._protected:
            self._protected.move_to_end(key)
        else:
            del self._probation[key]
            self._protected[key] = None
            if len(self._protected) > self._protected_size:
                self._probation[self._protected.popitem(last=False)[0]] = None

    def evict(self, incoming: int | None = None) -> int:
        candidate = None
        if len(self._window) >= self._window_size:
            candidate = self._pop(self._window)
        victim, segment = self._pop(self._probation), self._probation
        if victim is None:
            victim, segment = self._pop(self._protected), self._protected
        if victim is None:
            return self._pop(self._window) if candidate is None else candidate
        if candidate is None:
            return victim
        if self._sketch.estimate(candidate) > self._sketch.estimate(victim):
            self._probation[candidate] = None
            return victim
        self._restore(victim, segment)
        return candidate

    def forget(self, key: int) -> None:
        for queue in (self._window, self._probation, self._protected):
            queue.pop(key, None)
