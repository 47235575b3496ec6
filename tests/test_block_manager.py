"""The rules of the block manager, each by example. Ids and counts are worked out by hand."""

import numpy as np
import pytest

from cache.block_manager import BlockSpaceManager
from cache.content_hash import ExtraKey
from cache.interfaces import AllocStatus, Device, NoFreeBlocksError
from cache.sequence import Sequence, SequenceGroup, SequenceStatus
from tests.snapshot import assert_unchanged, snapshot

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


def create(
    num_gpu_blocks: int = 8,
    num_cpu_blocks: int = 8,
    block_size: int = 4,
    watermark: float = 0.0,
    enable_caching: bool = True,
    **options: object,
) -> BlockSpaceManager:
    return BlockSpaceManager(
        block_size,
        num_gpu_blocks,
        num_cpu_blocks,
        watermark,
        enable_caching=enable_caching,
        hash_seed=7,
        **options,
    )


def group_of(*seqs: Sequence) -> SequenceGroup:
    return SequenceGroup(f"request {seqs[0].seq_id}", seqs)


def waiting(seq_id: int, prompt: object, extra_key: object = None) -> SequenceGroup:
    return group_of(Sequence(seq_id, prompt, extra_key))


def admit(manager: BlockSpaceManager, group: SequenceGroup, num_lookahead_slots: int = 0) -> None:
    manager.allocate(group, num_lookahead_slots)
    for seq in group.get_seqs(SequenceStatus.WAITING):
        seq.status = SequenceStatus.RUNNING


def running(
    manager: BlockSpaceManager, seq_id: int, prompt: object, extra_key: object = None
) -> SequenceGroup:
    group = waiting(seq_id, prompt, extra_key)
    admit(manager, group)
    return group


def table(manager: BlockSpaceManager, group: SequenceGroup, index: int = 0) -> list[int]:
    return manager.get_block_table(group.seqs[index]).tolist()


def append(
    manager: BlockSpaceManager, seq: Sequence, *tokens: int, num_lookahead_slots: int = 0
) -> list[list[int]]:
    seq.append_token_ids(tokens)
    return manager.append_slots(seq, num_lookahead_slots).tolist()


def finish(manager: BlockSpaceManager, group: SequenceGroup) -> None:
    """Compute and free: the full blocks stay in the cache."""
    manager.mark_blocks_as_computed(group)
    manager.free_many(group.seqs)


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


# -- rule 1: order


@pytest.mark.parametrize("enable_caching", [True, False])
def test_fresh_ids_ascend_and_a_freed_table_comes_back_in_order(enable_caching: bool) -> None:
    """Rule 1: the table is released last block first, so that its first block goes next."""
    manager = create(enable_caching=enable_caching)
    first = running(manager, 0, tokens(0, 10))
    second = running(manager, 1, tokens(100, 5))
    assert table(manager, first) == [0, 1, 2]
    assert table(manager, second) == [3, 4]
    manager.free(first.seqs[0])
    assert table(manager, running(manager, 2, tokens(200, 16))) == [0, 1, 2, 5]


def test_several_tables_are_released_last_first() -> None:
    manager = create(enable_caching=False)
    groups = [running(manager, i, tokens(0, 8)) for i in range(3)]
    manager.free_many([group.seqs[0] for group in groups])
    assert table(manager, running(manager, 9, tokens(0, 29))) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_uncached_ids_go_before_any_eviction() -> None:
    """Rule 1."""
    manager = create(num_gpu_blocks=5)
    finish(manager, running(manager, 0, tokens(0, 8)))
    partial = running(manager, 1, tokens(50, 3))
    manager.free(partial.seqs[0])
    assert table(manager, running(manager, 2, tokens(100, 17))) == [2, 3, 4, 1, 0]


# -- rule 2: eviction


def test_lru_evicts_the_oldest_then_the_deepest() -> None:
    """Rule 2, by the exact list of ids."""
    manager = create(num_gpu_blocks=6)
    groups = [running(manager, i, tokens(100 * i, 8)) for i in range(3)]
    for group, now in zip(groups, [2.0, 1.0, 3.0], strict=True):
        manager.access_all_blocks_in_seq(group.seqs[0], now)
    for group in groups:
        finish(manager, group)
    assert table(manager, running(manager, 9, tokens(900, 24))) == [3, 2, 1, 0, 5, 4]
    assert manager.get_stats().evictions == 6


def test_fifo_evicts_what_entered_first() -> None:
    manager = create(num_gpu_blocks=6, evictor="fifo")
    groups = [running(manager, i, tokens(100 * i, 8)) for i in range(3)]
    for group, now in zip(groups, [2.0, 1.0, 3.0], strict=True):
        manager.access_all_blocks_in_seq(group.seqs[0], now)
    for group in reversed(groups):
        finish(manager, group)
    assert table(manager, running(manager, 9, tokens(900, 24))) == [1, 0, 3, 2, 5, 4]


# -- rule 3: cached is not computed


def test_a_block_can_be_skipped_after_its_step_only() -> None:
    """Rule 3: admitted in one step, both share the block and compute it."""
    manager = create()
    prompt = tokens(0, 9)
    first, second = running(manager, 0, prompt), running(manager, 1, prompt)
    assert table(manager, first) == [0, 1, 2]
    assert table(manager, second) == [0, 1, 3]
    assert manager.get_num_cached_tokens(first.seqs[0]) == 0
    assert manager.get_num_cached_tokens(second.seqs[0]) == 0
    manager.mark_blocks_as_computed(first)
    third = running(manager, 2, prompt)
    assert manager.get_num_cached_tokens(third.seqs[0]) == 8
    assert manager.get_num_cached_tokens(second.seqs[0]) == 0


def test_chunks_are_computed_block_by_block() -> None:
    """Rule 3: tokens computed, rounded down to blocks; a later chunk adds to them."""
    manager = create()
    prompt = tokens(0, 12)
    group = running(manager, 0, prompt)
    waits = Sequence(1, [*prompt, 0])
    for num_computed, cached in [(0, 0), (3, 0), (4, 4), (2, 4), (11, 8), (None, 12)]:
        manager.mark_blocks_as_computed(group, num_computed)
        assert manager.get_num_cached_tokens(waits) == cached
    [row] = manager.rows_of(group.seqs)
    manager.mark_blocks_as_computed_batch(np.array([row]), np.array([12]))
    assert manager.get_num_cached_tokens(waits) == 12


def test_a_block_freed_before_it_was_computed_leaves_the_cache() -> None:
    """Rule 3: its KV was never written."""
    manager = create()
    group = running(manager, 0, tokens(0, 12))
    manager.mark_blocks_as_computed(group, 4)
    manager.free(group.seqs[0])
    again = running(manager, 1, tokens(0, 12))
    assert manager.get_num_cached_tokens(again.seqs[0]) == 4
    assert manager.get_stats().hits == 1
    assert manager.get_num_free_gpu_blocks() == 5


def test_a_block_that_another_sequence_computes_stays() -> None:
    manager = create()
    first, second = running(manager, 0, tokens(0, 5)), running(manager, 1, tokens(0, 5))
    manager.free(first.seqs[0])
    finish(manager, second)
    assert manager.get_num_cached_tokens(Sequence(2, tokens(0, 5))) == 4


# -- rule 4: hits are checked


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, "a"),
        ("a", "b"),
        (1, True),
        (1, 1.0),
        (0, False),
        ("1", 1),
        ("a", b"a"),
        (-1, -2),
        ((1, 2), (1, (2,))),
        (("a", "b"), ("ab",)),
        (ExtraKey(adapter="x"), ExtraKey(cache_salt="x")),
        (ExtraKey(cache_salt="x"), ExtraKey(mm_hashes=("x",))),
    ],
    ids=repr,
)
def test_equal_extra_keys_share_and_different_ones_never(one: object, other: object) -> None:
    """Rule 4, also where Python confuses the values."""
    manager = create()
    prompt = tokens(0, 9)
    finish(manager, running(manager, 0, prompt, one))
    assert manager.get_num_cached_tokens(Sequence(1, prompt, other)) == 0
    assert manager.get_num_cached_tokens(Sequence(1, prompt, one)) == 8
    finish(manager, running(manager, 2, prompt, other))
    assert manager.get_num_cached_tokens(Sequence(1, prompt, other)) == 8


def test_generated_blocks_carry_the_extra_key() -> None:
    """Rule 4: a block that fills by appending hangs on the salt as well."""
    manager = create()
    group = running(manager, 0, [1, 2], "salt")
    append(manager, group.seqs[0], 3, 4, 5)
    finish(manager, group)
    assert manager.get_num_cached_tokens(Sequence(1, [1, 2, 3, 4, 5], "salt")) == 4
    assert manager.get_num_cached_tokens(Sequence(1, [1, 2, 3, 4, 5])) == 0


def test_a_caller_may_reuse_its_buffer() -> None:
    """Guards against tokens that change behind the hashes that were taken of them."""
    manager = create()
    buffer = np.array(tokens(0, 9), dtype=np.int32)
    group = waiting(0, buffer)
    assert manager.can_allocate(group) is OK
    buffer[:] = 7
    admit(manager, group)
    manager.check_integrity()
    assert group.seqs[0].token_ids.tolist() == tokens(0, 9)


# -- rule 5: lookups


def test_a_lookup_leaves_a_token_to_compute() -> None:
    """Rule 5: 8 cached tokens of an 8-token prompt give 4."""
    manager = create()
    finish(manager, running(manager, 0, tokens(0, 8)))
    for length, cached in [(8, 4), (9, 8), (12, 8), (4, 0), (5, 4), (1, 0)]:
        assert manager.get_num_cached_tokens(Sequence(1, tokens(0, length))) == cached
    again = running(manager, 2, tokens(0, 8))
    assert table(manager, again) == [0, 1]
    assert manager.get_num_cached_tokens(again.seqs[0]) == 4


def test_a_hit_behind_a_gap_is_shared_but_not_skipped() -> None:
    """Rules 5 and 9: the prefix was evicted, what follows was not."""
    manager = create(num_gpu_blocks=3)
    cached = running(manager, 0, tokens(0, 8))
    manager.allocator.mark_blocks_as_accessed([0], 1.0)
    manager.allocator.mark_blocks_as_accessed([1], 5.0)
    finish(manager, cached)
    taker = running(manager, 1, tokens(100, 5))
    assert table(manager, taker) == [2, 0]
    assert manager.can_allocate(waiting(2, tokens(0, 12))) is LATER
    manager.free(taker.seqs[0])
    group = waiting(2, tokens(0, 12))
    assert manager.can_allocate(group) is OK
    admit(manager, group)
    assert table(manager, group) == [2, 1, 0]
    assert manager.get_num_cached_tokens(group.seqs[0]) == 0
    assert manager.get_num_free_gpu_blocks() == 0
    manager.check_integrity()


def test_a_request_does_not_evict_a_hit_behind_a_gap() -> None:
    """Rule 8: the late hit is the oldest block there is, and must be referenced first."""
    manager = create(num_gpu_blocks=4)
    cached = running(manager, 0, tokens(0, 8))
    manager.allocator.mark_blocks_as_accessed([0], 1.0)
    manager.allocator.mark_blocks_as_accessed([1], 5.0)
    newer = running(manager, 1, tokens(50, 8))
    manager.access_all_blocks_in_seq(newer.seqs[0], 9.0)
    finish(manager, cached)
    finish(manager, newer)
    assert table(manager, running(manager, 2, [100])) == [0]
    assert table(manager, running(manager, 3, tokens(0, 8))) == [3, 1]
    manager.check_integrity()


def test_counts_are_not_remembered_across_a_failed_admission() -> None:
    """Rule 5: what was cached when admission failed may be gone when it succeeds."""
    manager = create(num_gpu_blocks=7)
    finish(manager, running(manager, 0, tokens(0, 8)))
    blocker = running(manager, 1, tokens(100, 12))
    group = waiting(2, tokens(0, 16))
    assert manager.get_num_cached_tokens(group.seqs[0]) == 8
    assert manager.can_allocate(group) is OK
    other = running(manager, 3, tokens(200, 16))
    assert manager.can_allocate(group) is LATER
    with pytest.raises(NoFreeBlocksError):
        manager.allocate(group)
    manager.free_many([blocker.seqs[0], other.seqs[0]])
    assert manager.can_allocate(group) is OK
    admit(manager, group)
    assert manager.get_num_cached_tokens(group.seqs[0]) == 0


def test_the_common_computed_prefix() -> None:
    """Rule 5: empty as soon as one sequence has none."""
    manager = create()
    first = running(manager, 0, tokens(0, 12))
    second = running(manager, 1, [*tokens(0, 8), 99])
    third = running(manager, 2, [99])
    seqs = [group.seqs[0] for group in (first, second, third)]
    assert manager.get_common_computed_block_ids(seqs[:2]) == []
    manager.mark_blocks_as_computed(first)
    assert manager.get_common_computed_block_ids(seqs[:1]) == [0, 1, 2]
    assert manager.get_common_computed_block_ids(seqs[:2]) == [0, 1]
    assert manager.get_common_computed_block_ids(seqs) == []
    assert manager.get_common_computed_block_ids([]) == []


# -- rule 6: promotion


def test_a_block_that_fills_with_cached_content_becomes_the_cached_one() -> None:
    """Rule 6: the table entry changes, the id is handed out next, reference counts follow."""
    manager = create()
    first = running(manager, 0, tokens(0, 4))
    manager.mark_blocks_as_computed(first)
    second = running(manager, 1, tokens(0, 3))
    assert table(manager, second) == [1]
    assert append(manager, second.seqs[0], 3) == []
    assert table(manager, second) == [0]
    assert manager.get_num_free_gpu_blocks() == 7
    assert manager.get_stats().promotions == 1
    manager.free(first.seqs[0])
    assert manager.get_num_free_gpu_blocks() == 7
    assert append(manager, second.seqs[0], 4) == []
    assert table(manager, second) == [0, 1]
    manager.check_integrity()


def test_promotion_to_a_prompt_in_prefill_records_a_copy() -> None:
    """The cached block's KV may not be there when the promoted sequence reads it."""
    manager = create()
    growing = running(manager, 0, tokens(0, 3))
    manager.mark_blocks_as_computed(growing)
    running(manager, 1, tokens(0, 4))
    assert append(manager, growing.seqs[0], 3) == [[0, 1]]
    assert table(manager, growing) == [1]


def test_of_a_batch_that_fills_alike_the_first_row_is_cached() -> None:
    manager = create()
    groups = [running(manager, i, tokens(0, 3)) for i in range(3)]
    rows = manager.rows_of([group.seqs[0] for group in groups])
    assert manager.append_slots_batch(rows[[2, 0, 1]], [3, 9, 3]).tolist() == []
    assert [table(manager, group) for group in groups] == [[0], [2], [2]]
    manager.check_integrity()


# -- rule 7: copy-on-write


@pytest.mark.parametrize("enable_caching", [True, False])
def test_the_first_write_to_a_shared_block_copies_it(enable_caching: bool) -> None:
    """Rule 7, with three owners: the last one finds the block its own."""
    manager = create(enable_caching=enable_caching)
    group = running(manager, 0, tokens(0, 6))
    [parent] = group.seqs
    children = [parent.fork(1), parent.fork(2)]
    manager.fork_many(parent, children)
    for child in children:
        group.add(child)
    assert manager.get_num_free_gpu_blocks() == 6
    assert append(manager, children[1], 7) == [[1, 2]]
    assert append(manager, parent, 8) == [[1, 3]]
    assert append(manager, children[0], 9) == []
    assert [table(manager, group, i) for i in range(3)] == [[0, 3], [0, 1], [0, 2]]


def test_a_batch_copies_for_all_but_the_last_owner() -> None:
    """Rule 7: and no more than that, or a batch that fits would be refused."""
    manager = create(num_gpu_blocks=4)
    parent = running(manager, 0, tokens(0, 6)).seqs[0]
    children = [parent.fork(1), parent.fork(2)]
    manager.fork_many(parent, children)
    rows = manager.rows_of([parent, *children])
    assert manager.num_blocks_taken_by_append(rows) == 2
    assert manager.append_slots_batch(rows, [7, 8, 9]).tolist() == [[1, 2], [1, 3]]
    assert manager.get_num_free_gpu_blocks() == 0


def test_full_shared_blocks_are_not_copied() -> None:
    """Rule 7: full blocks are never written, so a fork at a block's end copies nothing."""
    manager = create()
    parent = running(manager, 0, tokens(0, 8)).seqs[0]
    child = parent.fork(1)
    manager.fork(parent, child)
    assert append(manager, parent, 9) == []
    assert append(manager, child, 9) == []
    assert manager.get_block_table(parent).tolist() == [0, 1, 2]
    assert manager.get_block_table(child).tolist() == [0, 1, 3]


def test_lookahead_slots_alone_copy_nothing() -> None:
    """Rule 10: a shared block is copied when it is written, not when room behind it is taken."""
    manager = create()
    parent = running(manager, 0, tokens(0, 6)).seqs[0]
    child = parent.fork(1)
    manager.fork(parent, child)
    assert append(manager, child, num_lookahead_slots=5) == []
    assert manager.get_block_table(child).tolist() == [0, 1, 2]
    # Now the fork shares an empty lookahead block, too, which a long write copies as well.
    grandchild = child.fork(2)
    manager.fork(child, grandchild)
    assert append(manager, grandchild, 6, 7, 8) == [[1, 3], [2, 4]]
    assert manager.get_block_table(grandchild).tolist() == [0, 3, 4]


# -- rule 8: all or nothing


@pytest.mark.parametrize("enable_caching", [True, False])
def test_what_does_not_fit_changes_nothing(enable_caching: bool) -> None:
    """Rule 8, for every action that takes blocks."""
    manager = create(num_gpu_blocks=4, num_cpu_blocks=1, enable_caching=enable_caching)
    group = running(manager, 0, tokens(0, 14))
    [parent] = group.seqs
    child = parent.fork(1)
    manager.fork(parent, child)
    group.add(child)
    for seq in group.seqs:
        seq.append_token_ids([1])
    big = waiting(9, tokens(100, 4))
    rows = manager.rows_of(group.seqs)
    before = snapshot(manager)
    for action in (
        lambda: manager.allocate(big),
        lambda: manager.append_slots(parent),
        lambda: manager.append_slots(child, 4),
        lambda: manager.append_slots_batch(rows, [1, 2]),
        lambda: manager.swap_out(group),
    ):
        with pytest.raises(NoFreeBlocksError, match="are free on"):
            action()
        assert_unchanged(manager, before)
    assert not manager.can_append_slots(group)
    assert not manager.can_swap_out(group)
    manager.check_integrity()


def test_a_request_does_not_evict_its_own_prefix() -> None:
    """Rule 8: can_allocate counts a hit on an evictable block, and allocate keeps it."""
    manager = create(num_gpu_blocks=4)
    finish(manager, running(manager, 0, tokens(0, 16)))
    group = waiting(1, [*tokens(0, 8), *tokens(100, 8)])
    assert manager.can_allocate(group) is OK
    admit(manager, group)
    assert table(manager, group) == [0, 1, 3, 2]
    assert manager.get_num_cached_tokens(group.seqs[0]) == 8


# -- rule 9: watermark


@pytest.mark.parametrize(
    ("num_blocks", "watermark", "needed", "answer"),
    [
        (8, 0.5, 4, OK),
        (8, 0.5, 5, NEVER),
        (50, 0.01, 50, OK),
        (100, 0.01, 99, OK),
        (100, 0.01, 100, NEVER),
        (29, 0.1, 27, OK),
        (29, 0.1, 28, NEVER),
        (8, 0.0, 8, OK),
        (8, 0.0, 9, NEVER),
        (4, 0.24, 4, OK),
        (4, 0.25, 4, NEVER),
    ],
)
@pytest.mark.parametrize("enable_caching", [True, False])
def test_the_watermark_in_an_empty_pool(
    num_blocks: int, watermark: float, needed: int, answer: AllocStatus, enable_caching: bool
) -> None:
    """Rule 9, case A10."""
    manager = create(num_blocks, watermark=watermark, enable_caching=enable_caching)
    for length in (4 * needed, 4 * needed - 3):
        assert manager.can_allocate(waiting(0, tokens(0, length))) is answer
    ahead = waiting(0, tokens(0, 4 * needed - 4)) if needed > 1 else None
    if ahead:
        assert manager.can_allocate(ahead, 1) is answer
        assert manager.can_allocate(ahead, 4) is answer


def test_later_while_others_hold_the_blocks() -> None:
    """Rule 9: LATER when an emptier pool would do, NEVER when none would."""
    manager = create(num_gpu_blocks=8, watermark=0.25)
    blocker = running(manager, 0, tokens(100, 8))
    assert manager.can_allocate(waiting(1, tokens(0, 16))) is OK
    assert manager.can_allocate(waiting(1, tokens(0, 17))) is LATER
    assert manager.can_allocate(waiting(1, tokens(0, 24))) is LATER
    assert manager.can_allocate(waiting(1, tokens(0, 25))) is NEVER
    manager.free(blocker.seqs[0])
    assert manager.can_allocate(waiting(1, tokens(0, 24))) is OK


def test_cached_blocks_in_use_cost_nothing_and_evictable_ones_do() -> None:
    """Rule 9, `required_now`."""
    manager = create(num_gpu_blocks=6)
    shared = running(manager, 0, tokens(0, 8))
    running(manager, 1, tokens(100, 4))
    group = waiting(2, [*tokens(0, 8), *tokens(200, 12)])
    assert manager.can_allocate(group) is OK
    finish(manager, shared)
    assert manager.get_num_free_gpu_blocks() == 5
    assert manager.can_allocate(group) is OK
    running(manager, 3, tokens(300, 4))
    assert manager.get_num_free_gpu_blocks() == 4
    assert manager.can_allocate(group) is LATER
    with pytest.raises(NoFreeBlocksError, match="5 blocks needed, 4 of 6"):
        manager.allocate(group)


def test_never_looks_at_the_request_and_not_at_the_cache() -> None:
    """Rule 9: `required` is what an empty pool would have to give."""
    manager = create(num_gpu_blocks=4, watermark=0.25)
    running(manager, 0, tokens(0, 12))
    assert manager.can_allocate(waiting(1, tokens(0, 16))) is NEVER
    assert manager.can_allocate(waiting(1, tokens(0, 12))) is OK


def test_appending_may_use_the_watermark_blocks() -> None:
    """Rule 9."""
    manager = create(num_gpu_blocks=4, watermark=0.5)
    group = running(manager, 0, tokens(0, 8))
    [seq] = group.seqs
    assert manager.can_allocate(waiting(1, [5])) is LATER
    seq.append_token_ids(tokens(8, 8))
    assert manager.can_append_slots(group)
    assert manager.append_slots(seq).tolist() == []
    assert manager.get_num_free_gpu_blocks() == 0


# -- rule 10: can_append_slots


def test_can_append_slots_counts_new_blocks_and_copies() -> None:
    """Rule 10: exactly; two forks at six of eight slots take one copy, not two blocks."""
    manager = create(num_gpu_blocks=4)
    group = running(manager, 0, tokens(0, 6))
    [parent] = group.seqs
    group.add(parent.fork(1))
    manager.fork(parent, group.seqs[1])
    running(manager, 9, [90])
    for seq in group.seqs:
        seq.append_token_ids([seq.seq_id])
    assert manager.get_num_free_gpu_blocks() == 1
    assert manager.can_append_slots(group)
    assert not manager.can_append_slots(group, 2)
    assert append(manager, group.seqs[0]) == [[1, 3]]
    assert append(manager, group.seqs[1]) == []
    assert manager.get_num_free_gpu_blocks() == 0
    assert manager.can_append_slots(group)
    assert manager.can_append_slots(group, 1)
    assert not manager.can_append_slots(group, 2)


@pytest.mark.parametrize("ahead", [0, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("num_new", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("sliding_window", [None, 3])
def test_can_append_slots_is_exact_for_one_sequence(
    ahead: int, num_new: int, sliding_window: int | None
) -> None:
    """Rules 8 and 10: what is said to be taken is what is taken."""
    manager = create(num_gpu_blocks=12, enable_caching=False, sliding_window=sliding_window)
    group = running(manager, 0, tokens(0, 6))
    [seq] = group.seqs
    total = -(-(6 + num_new + ahead) // 4)
    free = manager.get_num_free_gpu_blocks()
    seq.append_token_ids(tokens(0, num_new))
    assert manager.can_append_slots(group, ahead)
    assert manager.append_slots(seq, ahead).tolist() == []
    assert manager.get_num_free_gpu_blocks() == free - max(0, total - 2)


# -- rule 11: swap


@pytest.mark.parametrize("enable_caching", [True, False])
def test_swap_moves_what_forks_share_once(enable_caching: bool) -> None:
    """Rule 11."""
    manager = create(enable_caching=enable_caching)
    group = running(manager, 0, tokens(0, 10))
    group.add(group.seqs[0].fork(1))
    manager.fork(group.seqs[0], group.seqs[1])
    spare = running(manager, 9, tokens(90, 4))
    manager.swap_out(spare)
    assert manager.can_swap_out(group)
    pairs = manager.swap_out(group)
    assert pairs.dtype == np.int64
    assert pairs.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert table(manager, group, 0) == table(manager, group, 1) == [1, 2, 3]
    assert manager.get_num_free_gpu_blocks() == 8
    assert manager.get_num_free_cpu_blocks() == 4
    assert manager.swap_in(group).tolist() == [[1, 0], [2, 1], [3, 2]]
    assert table(manager, group, 0) == table(manager, group, 1) == [0, 1, 2]
    assert append(manager, group.seqs[0], 5) == [[2, 3]]
    manager.check_integrity()


def test_swap_leaves_what_other_requests_hold() -> None:
    """Rule 11: ids are relative to the device, and a prefix shared with others stays for them."""
    manager = create()
    first, second = running(manager, 0, tokens(0, 8)), running(manager, 1, tokens(0, 6))
    assert table(manager, second) == [0, 2]
    assert manager.swap_out(second).tolist() == [[0, 0], [2, 1]]
    assert table(manager, first) == [0, 1]
    assert manager.get_num_free_gpu_blocks() == 6
    assert manager.swap_in(second).tolist() == [[0, 2], [1, 3]]
    manager.mark_blocks_as_computed(first)
    manager.swap_out(second)
    # Now the GPU has the first block's content, computed: only the second moves.
    assert manager.swap_in(second).tolist() == [[1, 2]]
    assert table(manager, second) == [0, 2]


def test_swap_keeps_what_is_known_of_a_block() -> None:
    manager = create(num_gpu_blocks=3)
    group = running(manager, 0, tokens(0, 12))
    manager.access_all_blocks_in_seq(group.seqs[0], 8.0)
    manager.mark_blocks_as_computed(group, 8)
    manager.swap_out(group)
    # Everything on the GPU is overwritten, so that all comes back by copies.
    manager.free(running(manager, 1, tokens(100, 12)).seqs[0])
    assert len(manager.swap_in(group)) == 3
    assert table(manager, group) == [2, 1, 0]
    assert manager.get_common_computed_block_ids(group.seqs) == [2, 1]
    pool = manager.allocator.allocator(Device.GPU).pool
    assert pool.last_accessed.tolist() == [8.0] * 3


def test_can_swap_in_keeps_the_watermark() -> None:
    """Rule 9 for swaps: LATER while others hold blocks, NEVER if it can't ever come back."""
    manager = create(num_gpu_blocks=8, watermark=0.25)
    group = running(manager, 0, tokens(0, 22))
    manager.swap_out(group)
    assert manager.can_swap_in(group) is OK
    assert manager.can_swap_in(group, 2) is OK
    assert manager.can_swap_in(group, 3) is NEVER
    blocker = running(manager, 1, tokens(100, 4))
    assert manager.can_swap_in(group) is LATER
    manager.free(blocker.seqs[0])
    assert manager.can_swap_in(group) is OK


def test_swapped_sequences_do_not_grow() -> None:
    manager = create()
    group = running(manager, 0, tokens(0, 5))
    [seq] = group.seqs
    rows = manager.rows_of(group.seqs)
    manager.swap_out(group)
    seq.append_token_ids([1])
    before = snapshot(manager)
    for action in (
        lambda: manager.append_slots(seq),
        lambda: manager.append_slots_batch(rows, [1]),
        lambda: manager.mark_blocks_as_computed_batch(rows, np.array([1])),
        lambda: manager.swap_out(group),
    ):
        with pytest.raises(ValueError, match="on GPU"):
            action()
    assert_unchanged(manager, before)
    assert not manager.can_append_slots(group)


# -- rule 12: sliding window


def windowed(**options: object) -> BlockSpaceManager:
    return create(enable_caching=False, **options)


def grow(manager: BlockSpaceManager, seq: Sequence, count: int) -> None:
    """Decode, one token a step."""
    for token in range(count):
        seq.num_computed_tokens = seq.num_tokens
        append(manager, seq, token)


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize(
    ("block_size", "window"), [(1, 1), (1, 3), (2, 1), (2, 4), (3, 5), (4, 3), (4, 4), (4, 9)]
)
def test_blocks_before_the_window_become_the_null_block(
    block_size: int, window: int, batch: bool
) -> None:
    """Rule 12: every key that the next query sees is kept, and little more."""
    manager = windowed(num_gpu_blocks=12, block_size=block_size, sliding_window=window)
    group = running(manager, 0, [1])
    [seq] = group.seqs
    assert table(manager, group) == [1]
    for position in range(1, 40):
        if batch:
            manager.append_slots_batch(manager.rows_of([seq]), [position])
            seq.append_token_ids([position])
        else:
            grow(manager, seq, 1)
        ids = manager.get_block_table(seq)
        first_key = max(0, position - window + 1)
        assert (ids[first_key // block_size :] > 0).all()
        # Rounding the window up to blocks may keep one block more.
        assert (ids[: max(0, first_key // block_size - 1)] == 0).all()
        manager.check_integrity()
    assert manager.get_num_free_gpu_blocks() >= 11 - (window // block_size + 2)
    manager.free(seq)
    assert manager.get_num_free_gpu_blocks() == 11


def test_the_null_block_is_no_part_of_the_counts() -> None:
    """Rule 12: it is never handed out, written, moved or freed."""
    manager = windowed(num_gpu_blocks=5, sliding_window=4)
    assert manager.get_num_free_gpu_blocks() == 4
    assert manager.get_num_total_gpu_blocks() == 4
    assert manager.can_allocate(waiting(0, tokens(0, 17))) is NEVER
    group = running(manager, 0, tokens(0, 16))
    assert table(manager, group) == [1, 2, 3, 4]
    pool = manager.allocator.allocator(Device.GPU).pool
    manager.free(group.seqs[0])
    assert pool.ref_count[0] == 1
    assert not pool.token_ids[0].any()


def test_fork_swap_and_free_work_behind_the_window() -> None:
    """Rule 12."""
    manager = windowed(num_gpu_blocks=12, block_size=2, sliding_window=3)
    group = running(manager, 0, tokens(0, 3))
    [parent] = group.seqs
    grow(manager, parent, 6)
    assert table(manager, group) == [0, 0, 0, 1, 2]
    child = parent.fork(1)
    manager.fork(parent, child)
    group.add(child)
    assert manager.get_num_free_gpu_blocks() == 9
    assert append(manager, child, 7) == [[2, 3]]
    assert manager.can_swap_out(group)
    assert manager.swap_out(group).tolist() == [[1, 0], [2, 1], [3, 2]]
    assert table(manager, group, 0) == [-1, -1, -1, 0, 1]
    assert manager.get_num_free_gpu_blocks() == 11
    assert manager.can_swap_in(group) is OK
    assert len(manager.swap_in(group)) == 3
    assert table(manager, group, 1)[:3] == [0, 0, 0]
    for seq in group.seqs:
        grow(manager, seq, 7)
        manager.check_integrity()
    manager.free_many(group.seqs)
    assert manager.get_num_free_gpu_blocks() == 11
    assert manager.get_num_free_cpu_blocks() == 8


def test_a_window_ends_at_the_last_token_whatever_is_said_to_be_computed() -> None:
    """Guards against dropping the block that the next token is written to."""
    manager = windowed(num_gpu_blocks=6, sliding_window=1)
    group = running(manager, 0, tokens(0, 6))
    group.seqs[0].num_computed_tokens = 1000
    append(manager, group.seqs[0], 1)
    assert table(manager, group) == [0, 2]
    append(manager, group.seqs[0], 2, 3)
    assert table(manager, group) == [0, 2, 1]
    assert not manager.allocator.allocator(Device.GPU).pool.token_ids[0].any()
    manager.check_integrity()


def test_caching_with_a_window_is_refused() -> None:
    """Rule 12."""
    with pytest.raises(ValueError, match="sliding window"):
        create(sliding_window=4)


# -- rule 13: integrity


@pytest.mark.parametrize(
    ("column", "block_id", "value"),
    [
        ("ref_count", 0, 2),
        ("ref_count", 0, 0),
        ("ref_count", 7, 1),
        ("token_ids", 0, 9),
        ("token_ids", 2, 9),
        ("content_hash", 1, 5),
        ("parent_hash", 1, 5),
        ("num_tokens", 0, 3),
        ("num_tokens", 3, 2),
        ("depth", 1, 0),
        ("cached", 0, False),
        ("computed", 2, False),
    ],
)
def test_integrity_notices(column: str, block_id: int, value: int) -> None:
    """Rule 13: a check that can't fail proves nothing."""
    manager = create()
    kept = running(manager, 0, tokens(0, 8))
    gone = running(manager, 1, tokens(100, 4))
    finish(manager, gone)
    admit(manager, waiting(2, [200]))
    assert table(manager, kept) == [0, 1]
    manager.check_integrity()
    getattr(manager.allocator.allocator(Device.GPU).pool, column)[block_id] = value
    with pytest.raises(AssertionError):
        manager.check_integrity()


def test_integrity_notices_lost_entries() -> None:
    """Rule 13: of the index, the evictor and the free ids."""

    def index(manager: BlockSpaceManager) -> None:
        gpu = manager.allocator.allocator(Device.GPU)
        gpu.index.remove(gpu.pool.content_hash[:1])

    def evictor(manager: BlockSpaceManager) -> None:
        manager.allocator.allocator(Device.GPU).evictor.remove(np.array([2], dtype=np.int32))

    def free_ids(manager: BlockSpaceManager) -> None:
        manager.allocator.allocator(Device.GPU).pool.take(1)

    def free_twice(manager: BlockSpaceManager) -> None:
        pool = manager.allocator.allocator(Device.GPU).pool
        pool.take(2)
        pool.give_back(np.array([4, 4], dtype=np.int32))

    for harm in (index, evictor, free_ids, free_twice):
        manager = create()
        running(manager, 0, tokens(0, 8))
        finish(manager, running(manager, 1, tokens(100, 4)))
        manager.check_integrity()
        harm(manager)
        with pytest.raises(AssertionError):
            manager.check_integrity()


# -- rule 14: errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": -4}, "block_size is -4"),
        ({"block_size": 1.5}, r"block_size is 1\.5"),
        ({"block_size": True}, "block_size is True"),
        ({"block_size": "16"}, "block_size is '16'"),
        ({"num_gpu_blocks": 0}, "num_gpu_blocks is 0"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks is -1"),
        ({"watermark": 1.0}, r"watermark is 1\.0"),
        ({"watermark": -0.1}, r"watermark is -0\.1"),
        ({"watermark": float("nan")}, "watermark is nan"),
        ({"watermark": "0.1"}, r"watermark is '0\.1'"),
        ({"sliding_window": 0, "enable_caching": False}, "sliding_window is 0"),
        ({"evictor": "mru"}, "'mru'"),
        ({"hash_algorithm": "md5"}, "'md5'"),
        ({"num_gpu_blocks": 1, "sliding_window": 4, "enable_caching": False}, "every request"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, object], message: str) -> None:
    """Rule 14."""
    with pytest.raises(ValueError, match=message):
        create(**options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([-1], "-1"),
        ([0, 2**31], "2147483648"),
        ([2**63], "9223372036854775808"),
        ([1.5], "float64"),
        (["a"], "dtype"),
        ([[1]], "shape"),
        (np.array([-5], dtype=np.int32), "-5"),
        (np.array([2**32], dtype=np.uint64), "4294967296"),
    ],
)
def test_bad_tokens_are_named(prompt: object, message: str) -> None:
    """Rule 14."""
    with pytest.raises(ValueError, match=message):
        Sequence(0, prompt)
    seq = Sequence(0, [1])
    if len(prompt):
        with pytest.raises(ValueError, match=message):
            seq.append_token_ids(prompt)
    assert seq.token_ids.tolist() == [1]


def test_the_largest_tokens_are_fine() -> None:
    manager = create()
    group = running(manager, 0, [0, 2**31 - 1, 0, 2**31 - 1])
    finish(manager, group)
    assert manager.get_num_cached_tokens(Sequence(1, [0, 2**31 - 1, 0, 2**31 - 1, 5])) == 4


def test_unknown_sequences_and_second_frees_are_refused() -> None:
    """Rule 14, case A24: nothing is changed."""
    manager = create()
    group = running(manager, 0, tokens(0, 5))
    [seq] = group.seqs
    stranger = Sequence("nobody", [1])
    lost = group_of(stranger)
    lost.seqs[0].status = SequenceStatus.RUNNING
    finished = running(manager, 5, tokens(0, 5)).seqs[0]
    manager.free(finished)
    before = snapshot(manager)
    for action in (
        lambda: manager.free(stranger),
        lambda: manager.free(finished),
        lambda: manager.free_many([seq, seq]),
        lambda: manager.free_many([seq, stranger]),
        lambda: manager.append_slots(stranger),
        lambda: manager.append_slots(finished),
        lambda: manager.get_block_table(stranger),
        lambda: manager.access_all_blocks_in_seq(stranger, 1.0),
        lambda: manager.access_all_blocks_in_seq(seq, float("nan")),
        lambda: manager.fork(stranger, Sequence(7, [1])),
        lambda: manager.fork(seq, seq),
        lambda: manager.fork_many(seq, [Sequence(7, [1]), Sequence(7, [1])]),
        lambda: manager.fork_many(seq, [Sequence(7, [1]), seq]),
        lambda: manager.swap_out(lost),
        lambda: manager.swap_in(group),
        lambda: manager.can_swap_in(group),
        lambda: manager.allocate(group),
        lambda: manager.can_allocate(group),
        lambda: manager.allocate(waiting(0, [5])),
        lambda: manager.append_slots(seq, -1),
        lambda: manager.can_allocate(waiting(8, [5]), -1),
        lambda: manager.append_slots_batch(manager.rows_of([seq, seq]), [1, 2]),
        lambda: manager.append_slots_batch(manager.rows_of([seq]), [1, 2]),
        lambda: manager.append_slots_batch(manager.rows_of([seq]), [-1]),
        lambda: manager.append_slots_batch(np.array([3]), [1]),
        lambda: manager.mark_blocks_as_computed(group, -1),
    ):
        with pytest.raises(ValueError, match=r"."):
            action()
        assert_unchanged(manager, before)
    manager.check_integrity()


def test_a_sequence_shorter_than_its_table_is_refused() -> None:
    manager = create()
    group = running(manager, 0, tokens(0, 5))
    [row] = manager.rows_of(group.seqs)
    manager.append_slots_batch(np.array([row]), [9])
    with pytest.raises(ValueError, match="fewer tokens than its table"):
        manager.append_slots(group.seqs[0])


def test_waiting_sequences_share_one_prompt_and_one_key() -> None:
    """Guards against a salt that leaks within a request, also where Python finds keys equal."""
    manager = create()
    group = group_of(Sequence(0, [1, 2, 3, 4, 5]), Sequence(1, [1, 2, 3, 4, 5]))
    admit(manager, group)
    assert table(manager, group, 0) == table(manager, group, 1) == [0, 1]
    before = snapshot(manager)
    for one, other in (
        (Sequence(2, [1]), Sequence(3, [2])),
        (Sequence(2, [1]), Sequence(3, [1, 1])),
        (Sequence(2, [1], "a"), Sequence(3, [1], "b")),
        (Sequence(2, [1], 1), Sequence(3, [1], True)),
    ):
        with pytest.raises(ValueError, match="differ"):
            manager.allocate(group_of(one, other))
    assert_unchanged(manager, before)


def test_sequence_groups_refuse_one_id_twice() -> None:
    with pytest.raises(ValueError, match="expected distinct"):
        group_of(Sequence(0, [1]), Sequence(0, [1]))
    with pytest.raises(ValueError, match="expected distinct"):
        SequenceGroup("empty", [])
    group = group_of(Sequence(0, [1]))
    with pytest.raises(ValueError, match="is in request"):
        group.add(Sequence(0, [1]))


# -- slots, tables and counters


def test_slot_mapping() -> None:
    manager = create(enable_caching=False)
    manager.free(running(manager, 0, tokens(0, 12)).seqs[0])
    running(manager, 1, [1])
    group = running(manager, 2, tokens(0, 6))
    [seq] = group.seqs
    assert table(manager, group) == [1, 2]
    slots = manager.get_slot_mapping(seq, 0, 6)
    assert slots.dtype == np.int64
    assert slots.tolist() == [4, 5, 6, 7, 8, 9]
    assert manager.get_slot_mapping(seq, 3, 5).tolist() == [7, 8]
    assert manager.get_slot_mapping(seq, 6, 8).tolist() == [10, 11]
    assert manager.get_slot_mapping(seq, 2, 2).tolist() == []
    for start, end in ((-1, 2), (0, 9), (5, 4), (8, 9)):
        with pytest.raises(ValueError, match="are not within the 2 blocks"):
            manager.get_slot_mapping(seq, start, end)


def test_block_tables_are_copies() -> None:
    manager = create()
    group = running(manager, 0, tokens(0, 5))
    manager.get_block_table(group.seqs[0])[:] = 7
    assert table(manager, group) == [0, 1]


def test_rows_and_columns_grow_on_demand() -> None:
    """More sequences than rows and more blocks than columns to start with."""
    manager = create(num_gpu_blocks=400, block_size=1, enable_caching=False)
    groups = [running(manager, i, [i]) for i in range(100)]
    long = running(manager, "long", tokens(0, 130))
    append(manager, long.seqs[0], *tokens(130, 160))
    assert table(manager, long) == tokens(100, 290)
    assert [table(manager, group) for group in groups] == [[i] for i in range(100)]
    manager.check_integrity()


def test_a_forked_child_reports_what_its_parent_found() -> None:
    manager = create()
    finish(manager, running(manager, 0, tokens(0, 9)))
    parent = running(manager, 1, tokens(0, 9)).seqs[0]
    child = parent.fork(2)
    manager.fork(parent, child)
    assert manager.get_num_cached_tokens(child) == 8


def test_reset_restores_a_new_pool() -> None:
    """Refused while a block is in use; then ids start at 0 and nothing is found."""
    manager = create()
    group = running(manager, 0, tokens(0, 9))
    blocker = running(manager, 1, [1])
    finish(manager, group)
    before = snapshot(manager)
    assert not manager.reset_prefix_cache()
    assert_unchanged(manager, before)
    manager.free(blocker.seqs[0])
    assert manager.reset_prefix_cache()
    again = running(manager, 2, tokens(0, 9))
    assert table(manager, again) == [0, 1, 2]
    assert manager.get_num_cached_tokens(again.seqs[0]) == 0
    assert manager.get_stats().hits == 0


def test_hit_rates() -> None:
    """Of blocks: full prompt blocks found, as a share of those looked up."""
    manager = create()
    assert np.isnan(manager.get_prefix_cache_hit_rate())
    running(manager, 0, tokens(0, 9))
    assert manager.get_prefix_cache_hit_rate() == 0.0
    running(manager, 1, tokens(0, 9))
    assert manager.get_prefix_cache_hit_rate() == 0.5
    # Looking and failing to admit count for nothing.
    manager.get_num_cached_tokens(Sequence(2, tokens(0, 9)))
    with pytest.raises(NoFreeBlocksError):
        manager.allocate(waiting(3, tokens(0, 36)))
    assert manager.get_prefix_cache_hit_rate() == 0.5
    assert np.isnan(manager.get_prefix_cache_hit_rate(Device.CPU))


def test_seeds_and_sha256_give_equal_results() -> None:
    """The choice of hash is not to be seen in what the manager decides."""
    tables = []
    for options in ({}, {"hash_algorithm": "sha256"}):
        manager = create(**options)
        finish(manager, running(manager, 0, tokens(0, 9)))
        tables.append(table(manager, running(manager, 1, tokens(0, 13))))
    assert tables[0] == tables[1] == [0, 1, 2, 3]


def test_a_new_extra_key_counts_also_after_a_lookup() -> None:
    """Hashes are kept with a waiting sequence; a changed salt must not meet the old chain."""
    manager = BlockSpaceManager(4, 16, 0, 0.0, None, True)
    first = Sequence(0, range(9), "a")
    group = SequenceGroup(0, [first])
    manager.allocate(group)
    manager.mark_blocks_as_computed(group)
    other = Sequence(1, range(9), "a")
    assert manager.get_num_cached_tokens(other) == 8
    other.extra_key = "b"
    assert manager.get_num_cached_tokens(other) == 0


@pytest.mark.parametrize("rows", [[99], [-1], [0, 16]])
def test_rows_out_of_range_are_refused(rows: list[int]) -> None:
    manager = BlockSpaceManager(4, 16, 0)
    manager.allocate(SequenceGroup(0, [Sequence(0, range(9))]))
    with pytest.raises(ValueError, match="rows are"):
        manager.append_slots_batch(rows, [1] * len(rows))


def test_negative_lookahead_is_refused_by_what_asks_and_by_what_acts() -> None:
    manager = BlockSpaceManager(4, 16, 0)
    group = SequenceGroup(0, [Sequence(0, range(9))])
    manager.allocate(group)
    rows = manager.rows_of(group.seqs)
    for call in (
        lambda: manager.can_append_slots(group, -1),
        lambda: manager.append_slots(group.seqs[0], -1),
        lambda: manager.append_slots_batch(rows, [1], -1),
        lambda: manager.num_blocks_taken_by_append(rows, -1),
    ):
        with pytest.raises(ValueError, match="num_lookahead_slots is -1"):
            call()


@pytest.mark.parametrize("token", [2**64, 1.5, "a"])
def test_a_token_of_another_kind_is_named(token: object) -> None:
    with pytest.raises(ValueError, match=str(token)):
        Sequence(0, [1, token])


def swapped_pair(num_gpu_blocks: int) -> tuple[BlockSpaceManager, Sequence, Sequence]:
    """Two computed sequences of two blocks; the second one is swapped out."""
    manager = BlockSpaceManager(4, num_gpu_blocks, 8, 0.0, enable_caching=True)
    seqs = [Sequence(0, range(8)), Sequence(1, range(100, 108))]
    groups = [SequenceGroup(i, [seq]) for i, seq in enumerate(seqs)]
    for group in groups:
        manager.allocate(group)
        manager.mark_blocks_as_computed(group)
    manager.swap_out(groups[1])
    return manager, *seqs


def test_swapped_sequences_have_no_computed_gpu_blocks_in_common() -> None:
    """Ids are relative to their device: CPU block 0 is not GPU block 0."""
    manager, on_gpu, on_cpu = swapped_pair(8)
    assert manager.get_common_computed_block_ids([on_gpu, on_gpu]) == [0, 1]
    assert manager.get_common_computed_block_ids([on_gpu, on_cpu]) == []
    assert manager.get_common_computed_block_ids([on_cpu]) == []


def test_what_is_swapped_out_cannot_append() -> None:
    manager, on_gpu, on_cpu = swapped_pair(8)
    assert manager.can_append_slots(SequenceGroup(0, [on_gpu]))
    assert not manager.can_append_slots(SequenceGroup(1, [on_cpu]))
    assert not manager.can_append_slots(SequenceGroup(2, [Sequence(9, [1])]))


@pytest.mark.parametrize("rows", [[0.7], [[0]], ["0"]])
def test_rows_of_another_kind_are_refused(rows: object) -> None:
    manager, *_ = swapped_pair(8)
    with pytest.raises(ValueError, match="rows are"):
        manager.append_slots_batch(rows, [1])


def test_slots_before_the_window_are_not_given_out() -> None:
    """The null block is nobody's to write."""
    manager = BlockSpaceManager(4, 16, 0, 0.0, sliding_window=4)
    seq = Sequence(0, range(13))
    manager.allocate(SequenceGroup(0, [seq]))
    seq.append_token_ids([1])
    seq.num_computed_tokens = 10**6
    manager.append_slots(seq)
    assert manager.get_block_table(seq).tolist() == [0, 0, 3, 4]
    with pytest.raises(ValueError, match="start is 7"):
        manager.get_slot_mapping(seq, 7, 14)
    assert manager.get_slot_mapping(seq, 8, 14).tolist() == [12, 13, 14, 15, 16, 17]


def test_a_bad_count_of_computed_tokens_changes_nothing() -> None:
    manager = BlockSpaceManager(4, 16, 0, 0.0, sliding_window=4)
    seq = Sequence(0, range(13))
    manager.allocate(SequenceGroup(0, [seq]))
    seq.append_token_ids([1])
    seq.num_computed_tokens = None
    with pytest.raises(ValueError, match="num_computed_tokens is None"):
        manager.append_slots(seq)
    assert manager.tables.seq_lens[manager.rows_of([seq])[0]] == 13


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"evictor": "lrru"}, "'lrru'"),
        ({"hash_seed": 1.5, "enable_caching": True}, "hash seed is 1.5"),
        ({"num_gpu_blocks": 2**31}, "int32"),
    ],
)
def test_bad_choices_are_refused_with_and_without_caching(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BlockSpaceManager(
            **{"block_size": 4, "num_gpu_blocks": 8, "num_cpu_blocks": 0, **arguments}
        )


def test_a_numpy_watermark_is_a_number() -> None:
    assert BlockSpaceManager(4, 100, 0, np.float32(0.1)).watermark_blocks == 10
