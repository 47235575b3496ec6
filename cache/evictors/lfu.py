"""LFU: the least often used block goes first, of these the least recently used.

Uses are counted while a block is cached. A. V. Aho, P. J. Denning and J. D. Ullman, "Principles of
optimal page replacement", Journal of the ACM, 1971.
"""

from .policy import RankedPolicy


class LFU(RankedPolicy):
    """Ranks by uses."""

    name = "lfu"

    def rank(self, key: int, uses: int, depth: int) -> float:
        return uses
