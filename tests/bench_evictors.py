"""What does an eviction cost, and does that grow with the pool?

    make bench-cache

For each policy, in pools of 10,000, 100,000 and 1,000,000 cached blocks: 64 blocks are evicted, 64
new ones enter and are released, over and over. Chains have 64 blocks; every third was hit. The time
is CPU time a block, the median of rounds. `most in use` is the same where all but 640 blocks are
held by running sequences: an eviction puts such a block aside once, when it meets it first, and
does not look through them again.
"""

import gc
import statistics
import time
from collections.abc import Iterator

import numpy as np
import pytest

from cache.block_pool import BlockPool
from cache.evictor import POLICIES, Evictor, Future, make_evictor

SIZES = (10_000, 100_000, 1_000_000)
CHAIN = 64
ROUNDS = 60
_table: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _print_table() -> Iterator[None]:
    yield
    sizes = "".join(f"{size:>13,}" for size in SIZES)
    print(f"\n\n{'us a block, evict / whole cycle':<34}{sizes}")
    print("\n".join(_table))


class Cycle:
    """A full pool, and one round of the workload."""

    def __init__(self, name: str, num_blocks: int, most_in_use: bool) -> None:
        num_blocks -= num_blocks % CHAIN
        self.pool = BlockPool(num_blocks, 16)
        rng = np.random.default_rng(0)
        # Contents are numbered; those that stand in the pool are used again, in random order.
        chains = rng.permutation(num_blocks // CHAIN)
        uses = (range(chain * CHAIN, (chain + 1) * CHAIN) for chain in chains.tolist())
        future = Future(uses) if name == "belady" else None
        self.evictor: Evictor = make_evictor(name, self.pool, future)
        self.now = 0
        self.next_content = 0
        free = np.arange(num_blocks, dtype=np.int32)
        num_released = 10 * CHAIN if most_in_use else num_blocks
        for start in range(0, num_blocks, CHAIN):
            self.enter(free[start : start + CHAIN])
            if start // CHAIN % 3 == 0:
                self.evictor.on_hit(free[start : start + CHAIN])
        for start in range(num_blocks - num_released, num_blocks, CHAIN):
            self.release(free[start : start + CHAIN])

    def enter(self, block_ids: np.ndarray) -> None:
        contents = np.arange(self.next_content, self.next_content + len(block_ids))
        self.next_content += len(block_ids)
        self.pool.content_hash[block_ids] = contents
        self.pool.depth[block_ids] = np.arange(len(block_ids))
        self.evictor.on_cached(block_ids)

    def release(self, block_ids: np.ndarray) -> None:
        self.now += 1
        self.pool.last_accessed[block_ids] = self.now
        self.evictor.add(block_ids[::-1])

    def run(self) -> tuple[float, float]:
        """Seconds of CPU time of the eviction, and of the whole round."""
        start = time.process_time()
        block_ids = self.evictor.evict(CHAIN)
        evicted = time.process_time()
        self.enter(block_ids)
        self.release(block_ids)
        return evicted - start, time.process_time() - start


@pytest.mark.parametrize("most_in_use", [False, True], ids=["all-evictable", "most-in-use"])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_eviction(name: str, most_in_use: bool) -> None:
    """Prints a row. Fails only where the cost follows the size of the pool."""
    cells, cycles = [], []
    for size in SIZES:
        cycle = Cycle(name, size, most_in_use)
        gc.collect()
        gc.disable()
        for _ in range(10):
            cycle.run()
        rounds = [cycle.run() for _ in range(ROUNDS)]
        gc.enable()
        evict, whole = (1e6 * statistics.median(r[i] for r in rounds) / CHAIN for i in (0, 1))
        cells.append(f"{evict:.2f} / {whole:.2f}")
        cycles.append(whole)
    label = f"{name}, most in use" if most_in_use else name
    _table.append(f"{label:<34}" + "".join(f"{cell:>13}" for cell in cells))
    assert cycles[-1] < 5 * cycles[0], f"{name}: {cycles} us a block"
