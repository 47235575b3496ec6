"""PrefixIndex against a dict."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.prefix_index import BUCKET_SIZE, EMPTY, PrefixIndex


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def assert_equals(index: PrefixIndex, expected: dict[int, int], absent: list[int]) -> None:
    assert len(index) == len(expected)
    found = index.lookup(ints([*expected, *absent]))
    assert found.tolist() == [*expected.values(), *[-1] * len(absent)]
    hashes, block_ids = index.entries()
    assert dict(zip(hashes.tolist(), block_ids.tolist(), strict=True)) == expected


# Hashes that share few home buckets, the last one included, so that buckets overflow and wrap.
crowded = st.builds(
    lambda top, low: int(np.uint64((top << 61) | low).view(np.int64)),
    st.sampled_from([0, 1, 7]),
    st.integers(1, 60),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(crowded, min_size=1, max_size=12, unique=True)),
        max_size=30,
    )
)
def test_follows_a_dict_where_buckets_overflow(steps: list[tuple[bool, list[int]]]) -> None:
    capacity = 24
    index = PrefixIndex(capacity, track_changes=True)
    assert index.num_buckets == 16
    copy_keys = index.keys.copy().ravel()
    copy_ids = index.block_ids.copy().ravel()
    expected: dict[int, int] = {}
    seen: set[int] = set()
    next_id = 0
    for adds, hashes in steps:
        seen.update(hashes)
        if adds:
            new = [h for h in hashes if h not in expected][: capacity - len(expected)]
            block_ids = list(range(next_id, next_id + len(new)))
            next_id += len(new)
            index.insert(ints(new), np.array(block_ids, dtype=np.int32))
            expected.update(zip(new, block_ids, strict=True))
        else:
            index.remove(ints(hashes))
            for h in hashes:
                expected.pop(h, None)
        assert_equals(index, expected, [h for h in seen if h not in expected])
        changes = index.drain_changes()
        copy_keys[changes.slots] = changes.keys
        copy_ids[changes.slots] = changes.block_ids
        assert np.array_equal(copy_keys, index.keys.ravel())
        occupied = copy_keys != EMPTY
        assert np.array_equal(copy_ids[occupied], index.block_ids.ravel()[occupied])


def test_churn_of_many_times_the_capacity_leaves_no_trace() -> None:
    """Guards against tombstones that fill the table and lengthen every lookup (case A02's kind)."""
    rng = np.random.default_rng(0)
    capacity = 1000
    index = PrefixIndex(capacity)
    held = np.zeros(0, np.int64)
    for _ in range(200):
        new = rng.integers(-(2**63), 2**63, capacity - len(held), dtype=np.int64)
        index.insert(new, np.arange(len(new), dtype=np.int32))
        held = rng.permutation(np.concatenate([held, new]))
        index.remove(held[: capacity // 2])
        held = held[capacity // 2 :]
    assert len(index) == len(held)
    assert (index.lookup(held) >= 0).all()
    index.remove(held)
    assert len(index) == 0
    assert not index.keys.any()


def test_hash_zero_is_never_found() -> None:
    index = PrefixIndex(4)
    index.insert(ints([0, 5]), np.array([1, 2], dtype=np.int32))
    assert index.lookup(ints([0, 5])).tolist() == [-1, 2]
    index.remove(ints([0]))
    assert len(index) == 1


def test_empty_batches() -> None:
    index = PrefixIndex(4)
    index.insert(ints([]), np.zeros(0, np.int32))
    index.remove(ints([]))
    assert index.lookup(ints([])).tolist() == []


def test_clear_is_told_to_copies() -> None:
    index = PrefixIndex(4, track_changes=True)
    index.insert(ints([3, 5]), np.array([1, 2], dtype=np.int32))
    index.drain_changes()
    index.clear()
    changes = index.drain_changes()
    assert len(changes.slots) == 2
    assert not changes.keys.any()
    assert len(index) == 0


def test_changes_without_tracking_are_refused() -> None:
    with pytest.raises(ValueError, match="track_changes"):
        PrefixIndex(4).drain_changes()


def test_a_bucket_is_one_cache_line() -> None:
    index = PrefixIndex(100)
    assert index.keys.strides == (64, 8)
    assert BUCKET_SIZE * index.keys.itemsize == 64
