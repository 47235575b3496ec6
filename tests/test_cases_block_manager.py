"""Known faults of block managers elsewhere, one test a case; the docstring starts with its id."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cache.block_manager import BlockSpaceManager
from cache.block_pool import BlockPool
from cache.content_hash import ContentHasher
from cache.cpu_gpu import CpuGpuBlockAllocator
from cache.evictor import make_evictor
from cache.interfaces import AllocStatus, Device, NoFreeBlocksError
from cache.sequence import Sequence, SequenceGroup, SequenceStatus
from tests.snapshot import assert_unchanged, snapshot

ROOT = Path(__file__).resolve().parent.parent
OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


def create(
    num_gpu_blocks: int,
    num_cpu_blocks: int = 0,
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
        **options,
    )


def waiting(seq_id: int, prompt: object, extra_key: object = None) -> SequenceGroup:
    return SequenceGroup(seq_id, [Sequence(seq_id, prompt, extra_key)])


def running(
    manager: BlockSpaceManager, seq_id: int, prompt: object, extra_key: object = None
) -> SequenceGroup:
    group = waiting(seq_id, prompt, extra_key)
    manager.allocate(group)
    group.seqs[0].status = SequenceStatus.RUNNING
    return group


def fork(manager: BlockSpaceManager, group: SequenceGroup, seq_id: int) -> Sequence:
    child = group.seqs[0].fork(seq_id)
    manager.fork(group.seqs[0], child)
    group.add(child)
    return child


def finish(manager: BlockSpaceManager, group: SequenceGroup) -> None:
    manager.mark_blocks_as_computed(group)
    manager.free_many(group.seqs)


def table(manager: BlockSpaceManager, seq: Sequence) -> list[int]:
    return manager.get_block_table(seq).tolist()


def append(manager: BlockSpaceManager, seq: Sequence, *tokens: int) -> list[list[int]]:
    seq.append_token_ids(tokens)
    return manager.append_slots(seq).tolist()


def test_a02_an_evicted_block_is_no_longer_found() -> None:
    """A02: a block popped from the evictor stayed in the map, and a later prompt "hit" it."""
    allocator = CpuGpuBlockAllocator.create("prefix_caching", 3, 0, 16)
    gpu = allocator.allocator(Device.GPU)
    contents = [list(range(16 * i, 16 * i + 16)) for i in range(3)]
    blocks = [allocator.allocate_immutable(None, tokens) for tokens in contents]
    allocator.mark_blocks_as_computed([0, 1, 2])
    for block in blocks:
        allocator.free(block)
    owner = allocator.allocate_mutable(None)
    assert owner.block_id == 0
    _, indexed = gpu.index.entries()
    assert sorted(indexed.tolist()) == [1, 2]
    assert allocator.find_cached_prefix([*contents[0], 0]).tolist() == []
    again = allocator.allocate_immutable(None, contents[0])
    assert again.block_id == 1
    owner.append_token_ids([7])
    assert again.token_ids.tolist() == contents[0]


def test_a03_cached_is_not_computed() -> None:
    """A03: the second sequence of a batch skipped blocks that nobody had computed yet."""
    manager = create(8, block_size=16)
    prompt = list(range(64))
    groups = [running(manager, i, [*prompt, 100 + i]) for i in range(3)]
    seqs = [group.seqs[0] for group in groups]
    assert manager.get_num_free_gpu_blocks() == 8 - 4 - 3
    assert [manager.get_num_cached_tokens(seq) for seq in seqs] == [0, 0, 0]
    assert [manager.get_common_computed_block_ids([seq]) for seq in seqs] == [[], [], []]
    manager.mark_blocks_as_computed(groups[0])
    assert manager.get_common_computed_block_ids(seqs) == [0, 1, 2, 3]
    late = Sequence(9, [*prompt, 1])
    assert manager.get_num_cached_tokens(late) == 64


def _swap_in_and_append(
    manager: BlockSpaceManager, group: SequenceGroup, num_lookahead_slots: int
) -> bool:
    try:
        manager.swap_in(group)
        manager.append_slots(group.seqs[0], num_lookahead_slots)
    except NoFreeBlocksError:
        return False
    return True


@pytest.mark.parametrize("num_lookahead_slots", [0, 2, 10])
@pytest.mark.parametrize("num_held", [0, 1, 2, 3])
@pytest.mark.parametrize("num_new", [1, 2, 9])
@pytest.mark.parametrize("enable_caching", [True, False])
def test_a08_can_swap_in_counts_what_the_append_takes(
    num_lookahead_slots: int, num_held: int, num_new: int, enable_caching: bool
) -> None:
    """A08: can_swap_in ignored tokens that were not appended yet, and lookahead slots."""
    manager = create(4, 4, block_size=8, enable_caching=enable_caching)
    group = running(manager, 0, list(range(7)))
    [seq] = group.seqs
    manager.swap_out(group)
    seq.append_token_ids(range(num_new))
    for i in range(num_held):
        running(manager, 1 + i, [90 + i])
    needed = -(-(7 + num_new + num_lookahead_slots) // 8)
    expected = NEVER if needed > 4 else OK if needed <= 4 - num_held else LATER
    assert manager.can_swap_in(group, num_lookahead_slots) is expected
    if expected is OK:
        assert _swap_in_and_append(manager, group, num_lookahead_slots)
        assert len(manager.get_block_table(seq)) == needed
    else:
        assert not _swap_in_and_append(manager, group, num_lookahead_slots)
    manager.check_integrity()


@pytest.mark.parametrize(
    ("num_blocks", "watermark", "needed", "answer"),
    [
        (8, 0.5, 4, OK),
        (8, 0.5, 5, NEVER),
        (50, 0.01, 50, OK),
        (100, 0.01, 99, OK),
        (100, 0.01, 100, NEVER),
        (29, 0.1, 28, NEVER),
        (49, 0.01, 63, NEVER),
        (4790, 0.01, 6250, NEVER),
    ],
)
def test_a10_what_can_never_fit_is_never_answered_later(
    num_blocks: int, watermark: float, needed: int, answer: AllocStatus
) -> None:
    """A10: a request that can't ever fit was answered LATER and blocked the queue for ever."""
    manager = create(num_blocks, block_size=16, watermark=watermark)
    assert manager.can_allocate(waiting(0, np.arange(16 * needed))) is answer


def test_a10_a_watermark_that_refuses_every_request_is_refused_itself() -> None:
    """A10: (10, 1.0, 1) would be NEVER, and so would every other request."""
    with pytest.raises(ValueError, match=r"watermark is 1\.0"):
        create(10, watermark=1.0)
    with pytest.raises(ValueError, match="every request would be refused"):
        BlockSpaceManager(4, 2, 0, watermark=0.5, sliding_window=4)


def test_a10_appending_may_use_the_watermark() -> None:
    """A10: the watermark is there for the running sequences to grow into."""
    manager = create(8, watermark=0.5, enable_caching=False)
    group = running(manager, 0, list(range(16)))
    for token in range(16):
        group.seqs[0].append_token_ids([token])
        assert manager.can_append_slots(group)
        manager.append_slots(group.seqs[0])
    assert manager.get_num_free_gpu_blocks() == 0
    group.seqs[0].append_token_ids([0])
    assert not manager.can_append_slots(group)


def test_a14_a_suffix_is_evicted_before_its_prefix() -> None:
    """A14: eviction took the head of a chain and stranded its tail, in most of 200 runs."""
    rng = np.random.default_rng(0)
    for run in range(200):
        manager = create(4)
        manager.free(running(manager, 0, [99]).seqs[0])
        held = running(manager, 1, [99, 99])
        prompt = rng.integers(0, 50, 12).tolist()
        group = running(manager, 2, prompt)
        [seq] = group.seqs
        assert table(manager, seq) == [1, 2, 3]
        manager.access_all_blocks_in_seq(seq, float(run))
        finish(manager, group)
        taker = running(manager, 3, [98])
        assert table(manager, taker.seqs[0]) == [3]
        assert manager.get_num_cached_tokens(Sequence(4, [*prompt, 1])) == 8
        manager.free(held.seqs[0])


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_a15_the_time_of_an_eviction_does_not_grow_with_the_pool(policy: str) -> None:
    """A15: an eviction scanned all free blocks: 7 ms each, and caching made things slower.

    What an eviction reads is counted in test_evictor.py; this is a generous bound on time.
    """
    seconds = []
    for num_blocks in (10_000, 640_000):
        evictor = make_evictor(policy, BlockPool(num_blocks, 1))
        evictor.add(np.arange(num_blocks, dtype=np.int32))
        evictor.evict(1)
        runs = []
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(1_000):
                evictor.evict(1)
            runs.append(time.perf_counter() - start)
        seconds.append(min(runs))
    assert seconds[1] < 8 * seconds[0] + 0.01


def test_a16_predictable_collisions_do_not_happen() -> None:
    """A16: a rolling hash collides for [a, b] -> [a + 31, b - 1], at any position."""
    rng = np.random.default_rng(0)
    for algorithm in ("mix64", "sha256"):
        for block_size in (2, 3, 16):
            hasher = ContentHasher(block_size, 0, algorithm)
            blocks = rng.integers(100, 1000, (3, block_size)).astype(np.int32)
            hashes = {tuple(hasher.hash_chain(blocks, hasher.root()).tolist())}
            flat = blocks.ravel()
            for i in range(len(flat) - 1):
                changed = flat.copy()
                changed[i : i + 2] += np.array([31, -1], dtype=np.int32)
                chain = hasher.hash_chain(changed.reshape(blocks.shape), hasher.root())
                assert chain[-1] not in {h[-1] for h in hashes}
                hashes.add(tuple(chain.tolist()))


def test_a16_the_root_differs_from_process_to_process_unless_seeded() -> None:
    """A16: a constant root lets a tenant build colliding prompts. A seed or sha256 fixes it."""
    code = (
        "from cache.content_hash import ContentHasher\n"
        "for seed, algorithm in ((None, 'mix64'), (5, 'mix64'), (None, 'sha256')):\n"
        "    print(int(ContentHasher(4, seed, algorithm).root()))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert runs[0][0] != runs[1][0]
    assert runs[0][1:] == runs[1][1:]


def test_a21_a_salt_separates_tenants_and_serves_its_own() -> None:
    """A21: timing revealed another tenant's prompt. The second half shows that caching is on."""
    manager = create(16)
    prompt = list(range(16))
    finish(manager, running(manager, 0, prompt, "tenant 1"))
    for other in ("tenant 2", None, ("tenant 1",), b"tenant 1"):
        assert manager.get_num_cached_tokens(Sequence(1, [*prompt, 0], other)) == 0
        group = running(manager, 1, [*prompt, 0], other)
        assert manager.get_num_cached_tokens(group.seqs[0]) == 0
        assert not {0, 1, 2, 3} & set(table(manager, group.seqs[0]))
        manager.free(group.seqs[0])
    same = running(manager, 2, [*prompt, 0], "tenant 1")
    assert table(manager, same.seqs[0])[:4] == [0, 1, 2, 3]
    assert manager.get_num_cached_tokens(same.seqs[0]) == 16


def test_a22_a_fully_cached_prompt_leaves_tokens_to_compute() -> None:
    """A22: a prompt of whole blocks, all cached, had no token left whose logits could be had."""
    manager = create(8)
    prompt = list(range(8))
    finish(manager, running(manager, 0, prompt))
    again = running(manager, 1, prompt)
    assert 1 <= 8 - manager.get_num_cached_tokens(again.seqs[0]) <= 4
    assert table(manager, again.seqs[0]) == [0, 1]
    finish(manager, again)
    follow_up = running(manager, 2, [*prompt, 8, 9, 10, 11])
    assert table(manager, follow_up.seqs[0])[:2] == [0, 1]
    assert manager.get_num_cached_tokens(follow_up.seqs[0]) == 8


def test_a23_a_request_does_not_evict_its_own_prefix() -> None:
    """A23: references were taken after the tail was allocated, not before.

    Once as reported, once where the prefix is the oldest that there is to evict.
    """
    for prompts in ([range(16)], [range(8), range(50, 58)]):
        manager = create(4)
        for i, prompt in enumerate(prompts):
            cached = running(manager, i, list(prompt))
            manager.access_all_blocks_in_seq(cached.seqs[0], i)
            finish(manager, cached)
        group = waiting(9, [*range(8), *range(100, 108)])
        assert manager.can_allocate(group) is OK
        manager.allocate(group)
        assert table(manager, group.seqs[0]) == [0, 1, 3, 2]
        assert manager.get_num_cached_tokens(group.seqs[0]) == 8
        manager.check_integrity()


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a24_a_second_free_is_refused(enable_caching: bool) -> None:
    """A24: a block released twice was queued twice, and two sequences got it.

    The random run of 10,000 steps is test_manager_model.py.
    """
    manager = create(4, enable_caching=enable_caching)
    group = running(manager, 0, [1, 2, 3, 4, 5])
    [seq] = group.seqs
    manager.free(seq)
    before = snapshot(manager)
    with pytest.raises(ValueError, match="sequence 0 has no blocks"):
        manager.free(seq)
    assert_unchanged(manager, before)
    taken = [running(manager, i, [i]) for i in range(1, 5)]
    ids = [table(manager, other.seqs[0])[0] for other in taken]
    assert sorted(ids) == [0, 1, 2, 3]


def test_a25_what_is_shared_is_counted_once() -> None:
    """A25: free and evictable together exceeded the pool, and the server died when idle."""
    manager = create(8, 8)
    group = running(manager, 0, list(range(10)))
    children = [fork(manager, group, i) for i in (1, 2)]
    other = running(manager, 3, list(range(9)))
    seen = []

    def check() -> None:
        manager.check_integrity()
        occupancy = manager.get_gpu_occupancy()
        assert sum(occupancy) == 8
        assert manager.get_num_free_gpu_blocks() == 8 - occupancy.num_in_use
        seen.append(occupancy.num_in_use)

    check()
    for seq in (*children, group.seqs[0]):
        append(manager, seq, seq.seq_id)
        check()
    manager.mark_blocks_as_computed(group)
    manager.swap_out(group)
    check()
    manager.swap_in(group)
    check()
    for seq in (*group.seqs, other.seqs[0]):
        manager.free(seq)
        check()
    assert seen == [4, 5, 6, 6, 3, 6, 5, 4, 3, 0]
    assert manager.get_num_free_gpu_blocks() == 8
    assert manager.get_num_free_cpu_blocks() == 8


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a26_forks_swap_without_being_unshared(enable_caching: bool) -> None:
    """A26: swapping sequence by sequence un-shared forks and used up the swap space."""
    manager = create(8, 3, enable_caching=enable_caching)
    group = running(manager, 0, list(range(10)))
    child = fork(manager, group, 1)
    assert manager.get_num_free_gpu_blocks() == 5
    assert manager.can_swap_out(group)
    pairs = manager.swap_out(group).tolist()
    assert len(pairs) == len({dst for _, dst in pairs}) == len({src for src, _ in pairs}) == 3
    assert manager.get_num_free_cpu_blocks() == 0
    assert manager.get_num_free_gpu_blocks() == 8
    assert manager.can_swap_in(group) is OK
    assert len(manager.swap_in(group)) == 3
    assert table(manager, group.seqs[0]) == table(manager, child)
    assert manager.get_num_free_gpu_blocks() == 5
    assert len(append(manager, child, 10)) == 1
    assert append(manager, group.seqs[0], 10) == []


def test_a27_copy_on_write_and_promotion_together() -> None:
    """A27: the wrong block was copied, or one leaked, when a copy filled with cached content."""
    manager = create(8)
    group = running(manager, 0, [1, 2, 3, 4, 5, 6])
    [parent] = group.seqs
    child = fork(manager, group, 1)
    assert append(manager, parent, 7) == [[1, 2]]
    assert append(manager, child, 7) == []
    assert table(manager, parent) == [0, 2]
    assert table(manager, child) == [0, 1]
    assert append(manager, parent, 8) == []
    assert append(manager, child, 8) == []
    assert table(manager, parent) == table(manager, child) == [0, 2]
    assert manager.get_num_free_gpu_blocks() == 6
    manager.check_integrity()
    manager.free_many([parent, child])
    assert manager.get_num_free_gpu_blocks() == 8


def test_a27_a_copy_without_room_changes_nothing() -> None:
    """A27: copy-on-write with no free block raises and leaves both references."""
    manager = create(2)
    group = running(manager, 0, [1, 2, 3, 4, 5, 6])
    child = fork(manager, group, 1)
    child.append_token_ids([7])
    assert not manager.can_append_slots(SequenceGroup("child", [child]))
    before = snapshot(manager)
    with pytest.raises(NoFreeBlocksError):
        manager.append_slots(child)
    assert_unchanged(manager, before)
    assert manager.allocator.allocator(Device.GPU).pool.ref_count.tolist() == [2, 2]


def test_a29_hit_and_miss_hold_the_same_tokens_slot_by_slot() -> None:
    """A29: greedy output differed with caching on.

    No KV and no attention at this level: here a hit's slots hold exactly the tokens that were
    written there for the miss, each one the same slot. test_manager_steps.py holds that for random
    schedules; outputs are compared where models are run.
    """
    manager = create(16)
    prompt = list(range(10))
    miss = running(manager, 0, prompt)
    slots = manager.get_slot_mapping(miss.seqs[0], 0, 10)
    pool = manager.allocator.allocator(Device.GPU).pool
    assert pool.flat_token_ids[slots].tolist() == prompt
    finish(manager, miss)
    hit = running(manager, 1, prompt)
    [seq] = hit.seqs
    assert manager.get_num_cached_tokens(seq) == 8
    assert manager.get_slot_mapping(seq, 0, 8).tolist() == slots[:8].tolist()
    for token in range(20, 30):
        append(manager, seq, token)
    slots = manager.get_slot_mapping(seq, 0, 20)
    assert len(set(slots.tolist())) == 20
    assert pool.flat_token_ids[slots].tolist() == seq.token_ids.tolist()
