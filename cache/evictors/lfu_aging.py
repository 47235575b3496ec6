"""LFU with dynamic aging: what was used often, but long ago, goes in the end.

M. Arlitt et al., "Evaluating content management techniques for web proxy caches", ACM SIGMETRICS
Performance Evaluation Review, 2000 (LFU-DA).
"""

from .policy import Future, RankedPolicy


class LFUAging(RankedPolicy):
    """Ranks by uses plus the cache's age, which is the rank of the last victim."""

    name = "lfu_aging"

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        super().__init__(capacity, block_size, future)
        self._age = 0.0

    def rank(self, key: int, uses: int, depth: int) -> float:
        return self._age + uses

    def evicted(self, rank: float) -> None:
        self._age = max(self._age, rank)
