"""Evictors against a sorted list."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_pool import BlockPool
from cache.evictor import Evictor, make_evictor


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def build(
    policy: str, depths: list[int], times: list[float] | None = None
) -> tuple[Evictor, BlockPool]:
    pool = BlockPool(len(depths), 1)
    pool.depth[:] = depths
    if times is not None:
        pool.last_accessed[:] = times
    return make_evictor(policy, pool), pool


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_an_empty_evictor(policy: str) -> None:
    evictor, _ = build(policy, [0, 1])
    evictor.add(int32([]))
    evictor.remove(int32([]))
    assert len(evictor) == 0
    assert evictor.evict(0).tolist() == []
    assert evictor.block_ids().tolist() == []


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match=r"'mru'; expected one of arc, .*lru"):
        make_evictor("mru", BlockPool(1, 1))


@pytest.mark.parametrize("batch", [1, 2, 7, 12])
def test_lru_goes_by_time_then_depth_then_id(batch: int) -> None:
    """Rule 2, in batches of any size. Ids are int32."""
    times = [3.0, 1.0, 1.0, 2.0, 1.0, 3.0, 0.5, 3.0, 2.0, -1.0, 2.0, 3.0]
    depths = [0, 0, 2, 1, 2, 5, 0, 5, 0, 0, 1, 7]
    evictor, _ = build("lru", depths, times)
    evictor.add(int32([5, 0, 7, 11]))
    evictor.add(int32([1, 2, 3, 4, 6]))
    evictor.add(int32([10, 9, 8]))
    victims: list[int] = []
    while len(evictor):
        part = evictor.evict(min(batch, len(evictor)))
        assert part.dtype == np.int32
        victims += part.tolist()
    assert victims == [9, 6, 2, 4, 1, 3, 10, 8, 11, 5, 7, 0]


def test_a_chain_loses_its_tail_first_every_time() -> None:
    """Case A14: over 200 runs, block 3 of [1, 2, 3], however they were freed and hit before."""
    rng = np.random.default_rng(0)
    evictor, _ = build("lru", [0, 0, 1, 2])
    for _ in range(200):
        evictor.add(int32(rng.permutation([1, 2, 3]).tolist()))
        assert evictor.evict(1).tolist() == [3]
        evictor.remove(int32(rng.permutation([1, 2]).tolist()))


def test_fifo_goes_by_entry_into_the_cache() -> None:
    """Blocks of one batch leave deepest first; hits and accesses change nothing."""
    evictor, pool = build("fifo", [0, 1, 0, 1, 0])
    evictor.on_cached(int32([4]))
    evictor.on_cached(int32([2, 3]))
    evictor.on_cached(int32([0, 1]))
    pool.last_accessed[:] = [1, 2, 3, 4, 5]
    evictor.add(int32([0, 1, 2, 3, 4]))
    evictor.remove(int32([4, 3]))
    evictor.add(int32([3, 4]))
    assert evictor.evict(5).tolist() == [4, 3, 2, 1, 0]


def test_fifo_counts_from_the_last_entry() -> None:
    evictor, _ = build("fifo", [0, 0])
    evictor.on_cached(int32([0]))
    evictor.on_cached(int32([1]))
    evictor.add(int32([0, 1]))
    assert evictor.evict(1).tolist() == [0]
    evictor.on_cached(int32([0]))
    evictor.add(int32([0]))
    assert evictor.evict(2).tolist() == [1, 0]


def test_a_removed_block_is_not_evicted_until_it_is_added_again() -> None:
    """Guards against entries that are left behind: the same block, at another time or the same."""
    evictor, pool = build("lru", [0, 0, 0], [1.0, 2.0, 3.0])
    evictor.add(int32([0, 1, 2]))
    evictor.remove(int32([0, 2]))
    assert len(evictor) == 1
    assert evictor.block_ids().tolist() == [1]
    pool.last_accessed[0] = 9.0
    evictor.add(int32([0]))
    evictor.add(int32([2]))
    assert len(evictor) == 3
    assert evictor.evict(3).tolist() == [1, 2, 0]
    assert len(evictor) == 0
    assert evictor.block_ids().tolist() == []


def test_a_block_that_moves_forward_in_time_leaves_no_ghost() -> None:
    """Guards against an old entry that comes alive again when the block is added anew."""
    evictor, pool = build("lru", [0, 0], [5.0, 4.0])
    for now in range(5, 50):
        pool.last_accessed[0] = now
        evictor.add(int32([0]))
        evictor.remove(int32([0]))
    evictor.add(int32([0, 1]))
    assert evictor.evict(1).tolist() == [1]
    assert evictor.evict(1).tolist() == [0]
    assert len(evictor) == 0


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_churn_keeps_the_memory_bounded(policy: str) -> None:
    """Guards against spent entries that pile up: hits and releases without any eviction."""
    num_blocks = 64
    evictor, pool = build(policy, list(range(num_blocks)))
    everything = np.arange(num_blocks, dtype=np.int32)
    for step in range(400):
        pool.last_accessed[:] = step
        evictor.on_cached(everything)
        evictor.add(everything)
        entries = sum(len(run.codes) - run.start for g in evictor._groups.values() for run in g)
        assert entries <= 2 * num_blocks + 1024 + num_blocks
        assert len(evictor._groups) <= len(evictor._heap) <= 64
        evictor.remove(everything)
    evictor.add(everything)
    assert evictor.evict(num_blocks).tolist() == everything[::-1].tolist()


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_a_sweep_keeps_what_is_evictable_in_order(policy: str) -> None:
    """Guards against a block lost, or out of order, while spent entries are swept out."""
    num_kept, num_blocks = 8, 72
    rng = np.random.default_rng(0)
    depths = rng.integers(0, 3, num_blocks)
    evictor, pool = build(policy, depths.tolist())
    kept = np.arange(num_kept, dtype=np.int32)
    churned = np.arange(num_kept, num_blocks, dtype=np.int32)
    evictor.on_cached(kept)
    for part in np.split(rng.permutation(kept), [5, 7]):
        evictor.add(part)
    sizes = []
    for step in range(1, 100):
        pool.last_accessed[churned] = step
        evictor.on_cached(churned)
        evictor.add(churned)
        evictor.remove(churned)
        sizes.append(evictor._num_entries)
    assert min(np.diff(sizes)) < 0, "nothing was swept"
    expected = sorted(kept.tolist(), key=lambda i: (-depths[i], i))
    assert evictor.evict(3).tolist() == expected[:3]
    assert evictor.evict(num_kept - 3).tolist() == expected[3:]


def test_clear_forgets_everything() -> None:
    for policy in ("lru", "fifo"):
        evictor, _ = build(policy, [0, 1, 2])
        evictor.on_cached(int32([2]))
        evictor.on_cached(int32([0, 1]))
        evictor.add(int32([0, 1, 2]))
        evictor.clear()
        assert len(evictor) == 0
        assert evictor.block_ids().tolist() == []
        evictor.on_cached(int32([0]))
        evictor.on_cached(int32([2]))
        evictor.add(int32([2, 0]))
        assert sorted(evictor.evict(2).tolist()) == [0, 2]


def test_the_cost_of_an_eviction_does_not_grow_with_the_pool() -> None:
    """Rule 2, case A15, counted and not timed: the codes that an eviction reads.

    Guards against a scan of all evictable blocks for each victim.
    """
    reads = []
    for num_blocks in (1_000, 100_000):
        evictor, _ = build("lru", [0] * num_blocks)
        evictor.add(np.arange(num_blocks, dtype=np.int32))
        counter = _CountingCodes(evictor)
        for _ in range(100):
            evictor.evict(1)
        reads.append(counter.num_read)
    assert reads[0] == reads[1] <= 200


class _CountingCodes:
    """Counts the codes that slices of the runs hand out."""

    def __init__(self, evictor: Evictor) -> None:
        self.num_read = 0
        outer = self

        class Codes(np.ndarray):
            def __getitem__(self, key: object) -> np.ndarray:
                part = np.asarray(self)[key]
                outer.num_read += np.size(part)
                return part

        for runs in evictor._groups.values():
            for run in runs:
                run.codes = run.codes.view(Codes)


class Step(NamedTuple):
    kind: str
    numbers: list[int]
    now: int


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["add", "add", "remove", "evict", "access", "cache"]),
        st.lists(st.integers(0, 19), max_size=12, unique=True),
        st.integers(0, 4),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@settings(max_examples=150, deadline=None)
@given(depths=st.lists(st.integers(0, 3), min_size=20, max_size=20), steps=steps)
def test_follows_a_sorted_list(policy: str, depths: list[int], steps: list[Step]) -> None:
    evictor, pool = build(policy, depths)
    ranks = [0.0] * 20
    evictable: dict[int, tuple[float, int, int]] = {}
    batches = 0
    for step in steps:
        if step.kind == "add":
            new = [i for i in step.numbers if i not in evictable]
            evictor.add(int32(new))
            evictable.update({i: (ranks[i], -depths[i], i) for i in new})
        elif step.kind == "remove":
            hit = [i for i in step.numbers if i in evictable]
            evictor.remove(int32(hit))
            for i in hit:
                del evictable[i]
        elif step.kind == "evict":
            count = min(len(step.numbers), len(evictable))
            expected = sorted(evictable, key=evictable.__getitem__)[:count]
            assert evictor.evict(count).tolist() == expected
            for i in expected:
                del evictable[i]
        else:
            in_use = [i for i in step.numbers if i not in evictable]
            if step.kind == "access":
                pool.last_accessed[in_use] = step.now
            else:
                evictor.on_cached(int32(in_use))
                batches += 1
            if (step.kind == "access") == (policy == "lru"):
                for i in in_use:
                    ranks[i] = step.now if policy == "lru" else batches
        assert len(evictor) == len(evictable)
        assert evictor.block_ids().tolist() == sorted(evictable)
    rest = evictor.evict(len(evictable)).tolist()
    assert rest == sorted(evictable, key=evictable.__getitem__)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_many_runs_of_one_rank(policy: str) -> None:
    """Blocks never accessed all have one rank, and come one by one."""
    rng = np.random.default_rng(1)
    num_blocks = 500
    depths = rng.integers(0, 6, num_blocks)
    evictor, _ = build(policy, depths.tolist())
    evictable: set[int] = set()
    for _ in range(3_000):
        i = int(rng.integers(num_blocks))
        if i not in evictable:
            evictor.add(int32([i]))
            evictable.add(i)
        elif rng.random() < 0.5:
            evictor.remove(int32([i]))
            evictable.remove(i)
        else:
            count = min(int(rng.integers(1, 5)), len(evictable))
            expected = sorted(evictable, key=lambda i: (-depths[i], i))[:count]
            assert evictor.evict(count).tolist() == expected
            evictable.difference_update(expected)
        assert len(evictor) == len(evictable)
