"""The block manager against the plain model where uncached blocks wait in the order of eviction.

As `test_manager_model`, with `reuse_uncached_first` off: a block given back without content is
taken when its turn comes, after older cached ones.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from cache.interfaces import Device
from cache.naive import Occupancy
from cache.prefix_caching import PrefixCachingBlockAllocator
from tests.test_manager_model import COMMON, NUM_EXAMPLES, ManagerMachine


class UncachedOrderMachine(ManagerMachine):
    """With caching and LRU."""

    num_steps = 0

    @initialize(
        block_size=st.sampled_from([2, 1, 3, 4]),
        num_gpu_blocks=st.sampled_from([8, 10, 12, 6, 4, 3]),
        num_cpu_blocks=st.sampled_from([8, 6, 3, 0]),
        watermark=st.sampled_from([0.0, 0.0, 0.1, 0.25]),
    )
    def build(self, **config: object) -> None:
        self.start("mix64", enable_caching=True, reuse_uncached_first=False, **config)


TestUncachedOrder = UncachedOrderMachine.TestCase
TestUncachedOrder.settings = settings(COMMON, max_examples=NUM_EXAMPLES // 4 + 1)


def test_an_old_cached_block_goes_before_a_newer_uncached_one() -> None:
    """By hand: prompts of 3 tokens, 2 a block, so each leaves a cached and an uncached block."""
    taken = {}
    for reuse_uncached_first in (True, False):
        allocator = PrefixCachingBlockAllocator(
            4, 2, Device.GPU, reuse_uncached_first=reuse_uncached_first
        )
        for now, first_token in enumerate((10, 20, 30, 40)):
            tokens = np.array([first_token, 0, 1], dtype=np.int32)
            block_ids = allocator.allocate_sequence(tokens, allocator.plan(tokens, 3))
            allocator.mark_computed(block_ids)
            allocator.pool.last_accessed[block_ids] = now
            allocator.release(block_ids[::-1], distinct=True)
            allocator.check_integrity()
        taken[reuse_uncached_first] = block_ids.tolist()
        cached = [t for t in (10, 20, 30, 40) if len(allocator.find_cached_prefix([t, 0, 1]))]
        if reuse_uncached_first:
            # Each takes the tail of the one before; 40's own tail evicts what 10 left in block 0.
            assert cached == [20, 30, 40]
            assert allocator.stats.evictions == 1
            assert allocator.occupancy() == Occupancy(0, 3, 1)
        else:
            # 30 takes the pair of 10, its tail first, and 40 the pair of 20.
            assert cached == [30, 40]
            assert allocator.stats.evictions == 2
            assert allocator.occupancy() == Occupancy(0, 2, 2)
    assert taken == {True: [3, 0], False: [3, 2]}
