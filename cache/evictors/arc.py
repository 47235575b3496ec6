"""ARC: balances blocks used once and blocks used often by what was evicted too early.

N. Megiddo and D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
"""

from collections import OrderedDict

from .policy import Future, Policy, Queue


class ARC(Policy):
    """Lists t1 (used once) and t2 (used again), ghosts b1 and b2 of what left each; LRU first.

    `target` is what t1 should hold, p in the paper: a use of a ghost moves it towards that side.
    """

    name = "arc"

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        super().__init__(capacity, block_size, future)
        self.target = 0.0
        self._t1: Queue = OrderedDict()
        self._t2: Queue = OrderedDict()
        self._b1: Queue = OrderedDict()
        self._b2: Queue = OrderedDict()

    def insert(self, key: int, depth: int = 0) -> None:
        if key in self._b1:
            del self._b1[key]
            self._t2[key] = None
        elif key in self._b2:
            del self._b2[key]
            self._t2[key] = None
        else:
            self._t1[key] = None

    def hit(self, key: int) -> None:
        if key in self._t2:
            self._t2.move_to_end(key)
            return
        if key in self._t1:
            del self._t1[key]
        else:
            del self._parked[key]
        self._t2[key] = None

    def evict(self, incoming: int | None = None) -> int:
        t1, b1, b2, capacity = self._t1, self._b1, self._b2, self.capacity
        prefers_t1 = False
        if incoming in b1:
            self.target = min(capacity, self.target + max(1.0, len(b2) / len(b1)))
        elif incoming in b2:
            self.target = max(0.0, self.target - max(1.0, len(b1) / len(b2)))
            prefers_t1 = len(t1) == self.target
        elif len(t1) >= capacity:
            victim = self._pop(t1)
            if victim is not None:
                return victim
        elif len(t1) + len(b1) >= capacity:
            b1.popitem(last=False)
        elif len(t1) + len(self._t2) + len(b1) + len(b2) >= 2 * capacity:
            b2.popitem(last=False)
        return self._replace(prefers_t1)

    def _replace(self, prefers_t1: bool) -> int:
        """Evict from t1 if it holds more than its target, else from t2; remember what it was."""
        from_t1 = (self._t1, self._b1)
        from_t2 = (self._t2, self._b2)
        t1_first = len(self._t1) > self.target or prefers_t1 or not self._t2
        for queue, ghosts in (from_t1, from_t2) if t1_first else (from_t2, from_t1):
            victim = self._pop(queue)
            if victim is not None:
                ghosts[victim] = None
                break
        # Where keys were pinned or dropped, the paper's steps alone would not bound the ghosts.
        while len(self._b1) > self.capacity:
            self._b1.popitem(last=False)
        while len(self._b1) + len(self._b2) > 2 * self.capacity:
            self._b2.popitem(last=False)
        return victim

    def forget(self, key: int) -> None:
        self._t1.pop(key, None)
        self._t2.pop(key, None)
