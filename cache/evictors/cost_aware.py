"""Cost-aware: weighs how often a block is used by what recomputing it costs at its position.

GreedyDual-Size with frequency: P. Cao and S. Irani, "Cost-aware WWW proxy caching algorithms",
USITS 1997; L. Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency
caching policy", HP Labs HPL-98-69R1, 1998. All blocks have one size. The cost of a block is that of
its matrix products, the same for all, plus attention, which grows with the tokens before it.
"""

from .policy import Future, RankedPolicy

EQUAL_COST_TOKENS = 27_000
"""Where attention costs as much as the matrix products. For Llama 3 8B, 2 * 7.0e9 FLOPs a token by
4 * 32 layers * 32 heads * 128 FLOPs a pair of tokens."""


class CostAware(RankedPolicy):
    """Ranks by age + uses * cost; the age is the rank of the last victim."""

    name = "cost_aware"

    def __init__(self, capacity: int, block_size: int = 1, future: Future | None = None) -> None:
        super().__init__(capacity, block_size, future)
        self._age = 0.0
        self._cost_per_block = block_size / EQUAL_COST_TOKENS

    def rank(self, key: int, uses: int, depth: int) -> float:
        return self._age + uses * (1.0 + depth * self._cost_per_block)

    def evicted(self, rank: float) -> None:
        self._age = max(self._age, rank)
