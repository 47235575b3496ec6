"""Length-aware: the least often used block goes first, of these the deepest in its chain.

LengthAwareCache of R. Qin et al., "Mooncake: trading more storage for less computation", FAST 2025.
"""

from .policy import RankedPolicy


class LengthAware(RankedPolicy):
    """Ranks by (uses, -depth), as one number."""

    name = "length_aware"

    def rank(self, key: int, uses: int, depth: int) -> float:
        return (uses << 32) - depth
