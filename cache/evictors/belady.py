"""Belady's MIN, the offline optimum: the block whose next use is farthest away goes first.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal, 1966. It is optimal where each block stands alone and can always be evicted; with chains
and blocks in use it is a strong reference, no bound.
"""

from .policy import Future, RankedPolicy


class Belady(RankedPolicy):
    """Ranks by the next use. Raises ValueError where the future is not known."""

    name = "belady"

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        super().__init__(capacity, block_size, future)
        if future is None:
            raise ValueError("evictor 'belady' needs the future of the trace, and none was given")
        self._future = future

    def rank(self, key: int, uses: int, depth: int) -> float:
        return -self._future.next_use(key)
