"""Both allocators through their object API: one suite for both, then what caching adds."""

import numpy as np
import pytest

from cache.block_table import BlockTable
from cache.content_hash import ContentHasher, ExtraKey
from cache.cpu_gpu import CpuGpuBlockAllocator
from cache.interfaces import Block, Device, NoFreeBlocksError
from cache.naive import NaiveBlock
from cache.prefix_caching import PrefixCachingBlock
from tests.snapshot import assert_unchanged, snapshot

BLOCK_SIZE = 4
KINDS = ["naive", "prefix_caching"]


def create(
    kind: str,
    num_gpu_blocks: int = 8,
    num_cpu_blocks: int = 8,
    block_size: int = BLOCK_SIZE,
    **options: object,
) -> CpuGpuBlockAllocator:
    return CpuGpuBlockAllocator.create(
        kind, num_gpu_blocks, num_cpu_blocks, block_size, hash_seed=7, **options
    )


@pytest.fixture(params=KINDS)
def allocator(request: pytest.FixtureRequest) -> CpuGpuBlockAllocator:
    return create(request.param)


@pytest.fixture
def caching() -> CpuGpuBlockAllocator:
    return create("prefix_caching")


def chain_of(allocator: CpuGpuBlockAllocator, *contents: list[int], **options: object) -> list:
    """Allocate immutable blocks, each behind the last."""
    blocks: list[Block] = []
    for tokens in contents:
        previous = blocks[-1] if blocks else None
        blocks.append(allocator.allocate_immutable(previous, tokens, **options))
    return blocks


def ids(blocks: list[Block]) -> list[int | None]:
    return [block.block_id for block in blocks]


def compute_and_free(allocator: CpuGpuBlockAllocator, blocks: list[Block]) -> None:
    allocator.mark_blocks_as_computed(ids(blocks))
    for block in reversed(blocks):
        allocator.free(block)


A, B, C, D = [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], [4, 4, 4, 4]


# -- both allocators: blocks


def test_a_mutable_block_fills_token_by_token(allocator: CpuGpuBlockAllocator) -> None:
    block = allocator.allocate_mutable(None)
    assert (block.num_empty_slots, block.is_full, block.num_tokens_total) == (4, False, 0)
    block.append_token_ids([5])
    block.append_token_ids([])
    block.append_token_ids(np.array([6, 7]))
    assert block.token_ids.tolist() == [5, 6, 7]
    assert (block.num_empty_slots, block.is_full, block.num_tokens_total) == (1, False, 3)
    assert block.content_hash is None
    block.append_token_ids([8])
    assert block.is_full
    assert block.token_ids.dtype == np.int32


def test_token_ids_are_a_copy(allocator: CpuGpuBlockAllocator) -> None:
    block = allocator.allocate_immutable(None, A)
    block.token_ids[:] = 9
    assert block.token_ids.tolist() == A


def test_a_chain_knows_its_order(allocator: CpuGpuBlockAllocator) -> None:
    first, second = chain_of(allocator, A, B)
    tail = allocator.allocate_mutable(second)
    tail.append_token_ids([7])
    assert first.prev_block is None
    assert tail.prev_block is second
    assert tail.prev_block.prev_block is first
    assert (first.num_tokens_total, second.num_tokens_total, tail.num_tokens_total) == (4, 8, 9)


def test_a_new_block_is_neither_computed_nor_accessed(allocator: CpuGpuBlockAllocator) -> None:
    """Guards against what the id's last owner left behind."""
    old = allocator.allocate_immutable(None, A)
    allocator.mark_blocks_as_computed([old.block_id])
    allocator.mark_blocks_as_accessed([old.block_id], 3.0)
    assert old.computed
    assert old.last_accessed == 3.0
    allocator.free(old)
    for _ in range(8):
        block = allocator.allocate_mutable(None)
        assert not block.computed
        assert block.last_accessed == 0.0
        assert not len(block.token_ids)


def test_a_freed_block_has_no_id_and_answers_nothing(allocator: CpuGpuBlockAllocator) -> None:
    block = allocator.allocate_mutable(None)
    allocator.free(block)
    assert block.block_id is None
    before = snapshot(allocator)
    for action in (
        lambda: allocator.free(block),
        lambda: block.append_token_ids([1]),
        lambda: block.token_ids,
        lambda: block.num_empty_slots,
        lambda: block.computed,
        lambda: allocator.fork(block),
        lambda: allocator.allocate_mutable(block),
        lambda: allocator.allocate_immutable(block, A),
    ):
        with pytest.raises(ValueError, match="freed"):
            action()
    assert_unchanged(allocator, before)


def test_a_refused_allocation_leaks_nothing(allocator: CpuGpuBlockAllocator) -> None:
    """Guards against a block that was taken before the block before it turned out to be freed."""
    block = allocator.allocate_mutable(None)
    allocator.free(block)
    with pytest.raises(ValueError, match="freed"):
        allocator.allocate_mutable(block)
    assert allocator.get_num_free_blocks() == 8


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, 3], "3 tokens given"),
        ([1, 2, 3, 4, 5], "5 tokens given"),
        ([], "0 tokens given"),
        ([1, 2, 3, -1], "-1"),
        ([1, 2, 3, 2**31], "2147483648"),
        ([1, 2, 3, 4.0], "float64"),
        ([[1, 2], [3, 4]], "shape"),
    ],
)
def test_immutable_needs_a_full_block_of_tokens(
    allocator: CpuGpuBlockAllocator, tokens: list, message: str
) -> None:
    before = snapshot(allocator)
    with pytest.raises(ValueError, match=message):
        allocator.allocate_immutable(None, tokens)
    assert_unchanged(allocator, before)


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4, 5], [-1], [2**31], [1.5], [True]])
def test_append_refuses_what_does_not_fit(
    allocator: CpuGpuBlockAllocator, tokens: list[int]
) -> None:
    block = allocator.allocate_mutable(None)
    before = snapshot(allocator)
    with pytest.raises(ValueError, match=r"."):
        block.append_token_ids(tokens)
    assert_unchanged(allocator, before)
    block.append_token_ids([0, 2**31 - 1])
    assert block.token_ids.tolist() == [0, 2**31 - 1]


def test_full_blocks_are_never_written(allocator: CpuGpuBlockAllocator) -> None:
    block = allocator.allocate_immutable(None, A)
    with pytest.raises(ValueError, match="0 empty slots"):
        block.append_token_ids([1])
    assert block.token_ids.tolist() == A


def test_nothing_follows_a_block_that_is_not_full(allocator: CpuGpuBlockAllocator) -> None:
    first = allocator.allocate_mutable(None)
    second = allocator.allocate_mutable(first)
    before = snapshot(allocator)
    with pytest.raises(ValueError, match="not full"):
        second.append_token_ids([1])
    with pytest.raises(ValueError, match="not full"):
        allocator.allocate_immutable(first, A)
    assert_unchanged(allocator, before)
    first.append_token_ids(A)
    second.append_token_ids([1])


def test_a_chain_stays_on_one_device(allocator: CpuGpuBlockAllocator) -> None:
    """Guards against the hash of a block on one device being read in the arrays of the other."""
    on_gpu = allocator.allocate_immutable(None, A)
    before = snapshot(allocator)
    for action in (
        lambda: allocator.allocate_mutable(on_gpu, Device.CPU),
        lambda: allocator.allocate_immutable(on_gpu, B, Device.CPU),
        lambda: allocator.allocator(Device.CPU).free(on_gpu),
    ):
        with pytest.raises(ValueError, match="another allocator"):
            action()
    assert_unchanged(allocator, before)


# -- both allocators: order, counts, reference counts


def test_fresh_ids_ascend_and_the_last_freed_goes_next(allocator: CpuGpuBlockAllocator) -> None:
    """Rule 1."""
    blocks = [allocator.allocate_mutable(None) for _ in range(5)]
    assert ids(blocks) == [0, 1, 2, 3, 4]
    for i in (1, 4, 2):
        allocator.free(blocks[i])
    assert ids([allocator.allocate_mutable(None) for _ in range(6)]) == [2, 4, 1, 5, 6, 7]


def test_devices_have_ids_and_counts_of_their_own() -> None:
    for kind in KINDS:
        allocator = create(kind, num_gpu_blocks=3, num_cpu_blocks=2)
        assert allocator.allocate_mutable(None, Device.GPU).block_id == 0
        assert allocator.allocate_mutable(None, Device.CPU).block_id == 0
        assert allocator.allocate_mutable(None, Device.CPU).block_id == 1
        assert allocator.get_num_free_blocks(Device.GPU) == 2
        assert allocator.get_num_free_blocks(Device.CPU) == 0
        assert allocator.get_num_total_blocks(Device.GPU) == 3
        assert allocator.get_num_total_blocks(Device.CPU) == 2
        with pytest.raises(NoFreeBlocksError, match="CPU"):
            allocator.allocate_mutable(None, Device.CPU)


def test_a_full_pool_changes_nothing(allocator: CpuGpuBlockAllocator) -> None:
    blocks = [allocator.allocate_mutable(None) for _ in range(8)]
    before = snapshot(allocator)
    with pytest.raises(NoFreeBlocksError, match="1 blocks needed, 0 of 8"):
        allocator.allocate_mutable(None)
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_immutable(None, A)
    assert_unchanged(allocator, before)
    allocator.free(blocks[3])
    assert allocator.allocate_mutable(None).block_id == 3


def test_freeing_twice_is_refused_even_by_id(allocator: CpuGpuBlockAllocator) -> None:
    """Case A24: a block released twice would be handed out twice."""
    block = allocator.allocate_mutable(None)
    block_id = block.block_id
    allocator.free(block)
    before = snapshot(allocator)
    gpu = allocator.allocator(Device.GPU)
    for wrong in ([block_id], [block_id, block_id]):
        with pytest.raises(ValueError, match=f"block {block_id} on GPU was freed before"):
            gpu.release(np.array(wrong, dtype=np.int32))
    assert_unchanged(allocator, before)


def test_release_of_more_than_is_held_changes_nothing(allocator: CpuGpuBlockAllocator) -> None:
    """Case A24, within one call: the first entries are valid, and must stay."""
    first, second = chain_of(allocator, A, B)
    gpu = allocator.allocator(Device.GPU)
    before = snapshot(allocator)
    with pytest.raises(ValueError, match=f"block {second.block_id}"):
        gpu.release(np.array([first.block_id, second.block_id, second.block_id], dtype=np.int32))
    assert_unchanged(allocator, before)


# -- both allocators: fork and copy-on-write


def test_a_fork_shares_the_whole_chain(allocator: CpuGpuBlockAllocator) -> None:
    blocks = chain_of(allocator, A, B, C)
    forks = allocator.fork(blocks[-1])
    assert ids(forks) == ids(blocks)
    assert [fork.prev_block for fork in forks] == [None, forks[0], forks[1]]
    assert allocator.get_num_free_blocks() == 5
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.get_num_free_blocks() == 5
    assert forks[2].token_ids.tolist() == C
    for fork in reversed(forks):
        allocator.free(fork)
    assert allocator.get_num_free_blocks() == 8


def test_the_first_write_to_a_shared_block_copies_it(allocator: CpuGpuBlockAllocator) -> None:
    """Rule 7."""
    block = allocator.allocate_mutable(None)
    block.append_token_ids([1, 2])
    allocator.mark_blocks_as_accessed([0], 5.0)
    [fork] = allocator.fork(block)
    fork.append_token_ids([3])
    assert fork.block_id == 1
    assert fork.token_ids.tolist() == [1, 2, 3]
    assert fork.last_accessed == 5.0
    assert not fork.computed
    block.append_token_ids([4])
    assert block.block_id == 0
    assert block.token_ids.tolist() == [1, 2, 4]
    pairs = allocator.clear_copy_on_writes()
    assert pairs.tolist() == [[0, 1]]
    assert pairs.dtype == np.int64
    assert allocator.clear_copy_on_writes().shape == (0, 2)


def test_copies_are_kept_in_order_until_drained(allocator: CpuGpuBlockAllocator) -> None:
    block = allocator.allocate_mutable(None)
    block.append_token_ids([1])
    forks = [allocator.fork(block)[0] for _ in range(3)]
    for i in (2, 0, 1):
        forks[i].append_token_ids([i])
    assert allocator.clear_copy_on_writes().tolist() == [[0, 1], [0, 2], [0, 3]]
    assert ids(forks) == [2, 3, 1]


def test_a_copy_into_a_block_given_back_is_withdrawn(allocator: CpuGpuBlockAllocator) -> None:
    """Rule 7: the id may belong to somebody else by the time the copies are made."""
    block = allocator.allocate_mutable(None)
    block.append_token_ids([1])
    forks = [allocator.fork(block)[0] for _ in range(2)]
    for fork in forks:
        fork.append_token_ids([2])
    allocator.free(forks[0])
    assert allocator.clear_copy_on_writes().tolist() == [[0, 2]]


def test_a_copy_of_a_copy_names_the_first_source(allocator: CpuGpuBlockAllocator) -> None:
    """All copies of a step can be made at once: block 1 holds nothing yet."""
    block = allocator.allocate_mutable(None)
    block.append_token_ids([1])
    [fork] = allocator.fork(block)
    fork.append_token_ids([2])
    [second] = allocator.fork(fork)
    second.append_token_ids([3])
    assert ids([block, fork, second]) == [0, 1, 2]
    assert allocator.clear_copy_on_writes().tolist() == [[0, 1], [0, 2]]


def test_a_copy_without_a_free_block_changes_nothing(allocator: CpuGpuBlockAllocator) -> None:
    """Case A27: the shared block still has both its references."""
    block = allocator.allocate_mutable(None)
    block.append_token_ids([1])
    [fork] = allocator.fork(block)
    others = [allocator.allocate_mutable(None) for _ in range(7)]
    before = snapshot(allocator)
    with pytest.raises(NoFreeBlocksError):
        fork.append_token_ids([2])
    assert_unchanged(allocator, before)
    assert fork.block_id == block.block_id
    assert allocator.allocator(Device.GPU).pool.ref_count[0] == 2
    allocator.free(others[0])
    fork.append_token_ids([2])
    assert fork.block_id == 1


def test_a_chain_of_100_000_blocks_forks() -> None:
    """Rule 7: a recursive fork ends at the interpreter's stack."""
    for kind in KINDS:
        allocator = create(kind, num_gpu_blocks=100_000, num_cpu_blocks=0, block_size=1)
        last = None
        for _ in range(100_000):
            last = allocator.allocate_mutable(last)
        forks = allocator.fork(last)
        assert forks[0].block_id == 0
        assert forks[-1].block_id == 99_999
        assert (allocator.allocator(Device.GPU).pool.ref_count == 2).all()


def test_blocks_of_a_table_are_read_only(allocator: CpuGpuBlockAllocator) -> None:
    """Guards against a fork behind a table's back: the table would write a shared block."""
    table = BlockTable(BLOCK_SIZE, allocator)
    table.allocate([1, 2, 3, 4, 5], extra_key="a")
    view = table.blocks[-1]
    assert view.token_ids.tolist() == [5]
    assert view.prev_block.token_ids.tolist() == [1, 2, 3, 4]
    before = snapshot(allocator)
    for action in (
        lambda: view.append_token_ids([6]),
        lambda: allocator.free(view),
        lambda: allocator.fork(view),
        lambda: allocator.swap([view], Device.GPU, Device.CPU),
    ):
        with pytest.raises(ValueError, match=r"block"):
            action()
    assert_unchanged(allocator, before)


# -- both allocators: marks, swap, errors


@pytest.mark.parametrize("wrong", [[8], [-1], [0, 8], [3]])
def test_marks_refuse_ids_that_are_not_in_use(
    allocator: CpuGpuBlockAllocator, wrong: list[int]
) -> None:
    allocator.allocate_mutable(None)
    before = snapshot(allocator)
    with pytest.raises(ValueError, match=str(wrong[-1])):
        allocator.mark_blocks_as_computed(wrong)
    with pytest.raises(ValueError, match=str(wrong[-1])):
        allocator.mark_blocks_as_accessed(wrong, 1.0)
    assert_unchanged(allocator, before)


@pytest.mark.parametrize("now", [float("nan"), float("inf")])
def test_time_is_a_finite_number(allocator: CpuGpuBlockAllocator, now: float) -> None:
    allocator.allocate_mutable(None)
    with pytest.raises(ValueError, match=str(now)):
        allocator.mark_blocks_as_accessed([0], now)


def test_swap_moves_a_chain_and_back(allocator: CpuGpuBlockAllocator) -> None:
    spare = allocator.allocate_mutable(None, Device.CPU)
    blocks = chain_of(allocator, A, B)
    tail = allocator.allocate_mutable(blocks[-1])
    tail.append_token_ids([9])
    blocks.append(tail)
    allocator.mark_blocks_as_accessed([0, 1, 2], 4.0)
    assert allocator.get_num_full_blocks_touched(blocks, Device.CPU) == 3
    pairs = allocator.swap(blocks, Device.GPU, Device.CPU)
    assert pairs.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert ids(blocks) == [1, 2, 3]
    assert [block.token_ids.tolist() for block in blocks] == [A, B, [9]]
    assert [block.last_accessed for block in blocks] == [4.0] * 3
    assert [block.num_tokens_total for block in blocks] == [4, 8, 9]
    assert allocator.get_num_free_blocks(Device.GPU) == 8
    assert allocator.get_num_free_blocks(Device.CPU) == 4
    allocator.free(spare)
    pairs = allocator.swap(blocks, Device.CPU, Device.GPU)
    assert pairs.tolist() == [[1, 0], [2, 1], [3, 2]]
    tail.append_token_ids([8, 7, 6])
    assert tail.token_ids.tolist() == [9, 8, 7, 6]
    assert allocator.get_num_free_blocks(Device.CPU) == 8


def test_the_first_block_has_none_before_it_after_a_swap(allocator: CpuGpuBlockAllocator) -> None:
    """Guards against reading what the id's last owner on that device had before it."""
    blocks = chain_of(allocator, A, B)
    allocator.swap(blocks, Device.GPU, Device.CPU)
    assert blocks[0].prev_block is None
    assert blocks[1].prev_block is blocks[0]
    forks = allocator.fork(blocks[-1])
    assert ids(forks) == [0, 1]


def test_swap_keeps_sharing(allocator: CpuGpuBlockAllocator) -> None:
    """Rule 11, case A26: what two forks share moves once."""
    blocks = chain_of(allocator, A, B)
    forks = allocator.fork(blocks[-1])
    pairs = allocator.swap([*blocks, *forks], Device.GPU, Device.CPU)
    assert pairs.tolist() == [[0, 0], [1, 1]]
    assert ids(forks) == ids(blocks) == [0, 1]
    assert allocator.allocator(Device.CPU).pool.ref_count[:2].tolist() == [2, 2]
    assert allocator.get_num_free_blocks(Device.GPU) == 8


def test_swap_of_one_fork_leaves_the_other(allocator: CpuGpuBlockAllocator) -> None:
    blocks = chain_of(allocator, A)
    forks = allocator.fork(blocks[-1])
    assert allocator.swap(forks, Device.GPU, Device.CPU).tolist() == [[0, 0]]
    assert allocator.get_num_free_blocks(Device.GPU) == 7
    assert blocks[0].token_ids.tolist() == forks[0].token_ids.tolist() == A
    allocator.free(blocks[0])
    assert allocator.get_num_free_blocks(Device.GPU) == 8


def test_swap_without_room_changes_nothing() -> None:
    for kind in KINDS:
        allocator = create(kind, num_cpu_blocks=1)
        blocks = chain_of(allocator, A, B)
        before = snapshot(allocator)
        with pytest.raises(NoFreeBlocksError):
            allocator.swap(blocks, Device.GPU, Device.CPU)
        assert_unchanged(allocator, before)
        assert ids(blocks) == [0, 1]


def test_swap_refuses_blocks_of_the_other_device(allocator: CpuGpuBlockAllocator) -> None:
    blocks = chain_of(allocator, A)
    with pytest.raises(ValueError, match="not a live standalone block"):
        allocator.swap(blocks, Device.CPU, Device.GPU)
    assert allocator.swap([], Device.GPU, Device.CPU).shape == (0, 2)


def test_swap_waits_for_copies_into_the_block(allocator: CpuGpuBlockAllocator) -> None:
    """Case D02: the KV of a block that is still to be copied into can't be moved yet."""
    block = allocator.allocate_mutable(None)
    block.append_token_ids([1])
    [fork] = allocator.fork(block)
    fork.append_token_ids([2])
    before = snapshot(allocator)
    with pytest.raises(ValueError, match=r"copies into blocks \[1\] are pending"):
        allocator.swap([fork], Device.GPU, Device.CPU)
    assert_unchanged(allocator, before)
    allocator.clear_copy_on_writes()
    assert allocator.swap([fork], Device.GPU, Device.CPU).tolist() == [[1, 0]]


def test_errors_of_construction_name_the_value() -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match="block_size is 0"):
            create(kind, block_size=0)
        with pytest.raises(ValueError, match=r"block_size is 1\.5"):
            create(kind, block_size=1.5)
        with pytest.raises(ValueError, match="num_blocks is -1"):
            create(kind, num_cpu_blocks=-1)
    with pytest.raises(ValueError, match="'buddy'"):
        create("buddy")
    with pytest.raises(ValueError, match="'mru'"):
        create("prefix_caching", evictor="mru")
    with pytest.raises(ValueError, match="'md5'"):
        create("prefix_caching", hash_algorithm="md5")
    with pytest.raises(ValueError, match="sliding window"):
        create("prefix_caching", reserve_null_block=True)


@pytest.mark.parametrize("device", [2, None, "gpu", []])
def test_an_unknown_device_is_named(allocator: CpuGpuBlockAllocator, device: object) -> None:
    with pytest.raises(ValueError, match="device is"):
        allocator.allocate_mutable(None, device)


def test_reset_is_refused_while_a_block_is_in_use(allocator: CpuGpuBlockAllocator) -> None:
    block = allocator.allocate_immutable(None, A)
    before = snapshot(allocator)
    assert not allocator.reset_prefix_cache()
    assert_unchanged(allocator, before)
    allocator.free(block)
    assert allocator.reset_prefix_cache()


def test_block_types(allocator: CpuGpuBlockAllocator, caching: CpuGpuBlockAllocator) -> None:
    assert isinstance(allocator.allocate_mutable(None), NaiveBlock)
    assert type(caching.allocate_mutable(None)) is PrefixCachingBlock


# -- without caching


def test_naive_blocks_are_never_shared_by_content() -> None:
    allocator = create("naive")
    first, second = allocator.allocate_immutable(None, A), allocator.allocate_immutable(None, A)
    assert ids([first, second]) == [0, 1]
    assert first.content_hash is None
    allocator.mark_blocks_as_computed([0, 1])
    assert allocator.find_cached_prefix(A + B).tolist() == []
    assert allocator.get_common_computed_block_ids([[0], [0]]) == []
    assert np.isnan(allocator.get_prefix_cache_hit_rate())


# -- with caching


def test_content_hash_is_of_full_blocks(caching: CpuGpuBlockAllocator) -> None:
    hasher = caching.allocator(Device.GPU).hasher
    block = caching.allocate_mutable(None)
    block.append_token_ids(A[:3])
    assert block.content_hash is None
    block.append_token_ids(A[3:])
    tail = caching.allocate_immutable(block, B)
    expected = hasher.hash_chain(np.array([A, B], dtype=np.int32), hasher.root())
    assert [block.content_hash, tail.content_hash] == expected.tolist()


def test_equal_prefixes_share_and_others_do_not(caching: CpuGpuBlockAllocator) -> None:
    """Rule 4: the tokens before, the position and the extra key all count."""
    assert ids(chain_of(caching, A, B)) == [0, 1]
    assert ids(chain_of(caching, A, B)) == [0, 1]
    assert ids(chain_of(caching, A, A)) == [0, 2]
    assert ids(chain_of(caching, B, B)) == [3, 4]
    assert ids(chain_of(caching, A, B, extra_key="salt")) == [5, 6]
    assert ids(chain_of(caching, A, B, extra_key="salt")) == [5, 6]
    assert caching.get_num_free_blocks() == 1
    assert caching.allocator(Device.GPU).stats.hits == 5
    assert caching.get_prefix_cache_hit_rate() == 5 / 12


def test_extra_keys_that_python_confuses_stay_apart() -> None:
    """Rule 4: 1 == True == 1.0 and hash(-1) == hash(-2) in Python."""
    keys = [
        None,
        1,
        True,
        1.0,
        "1",
        b"1",
        (1,),
        -1,
        -2,
        ("a", "b"),
        ("ab",),
        (("a",), "b"),
        ExtraKey(adapter="x"),
        ExtraKey(cache_salt="x"),
        ExtraKey(mm_hashes=("x",)),
    ]
    caching = create("prefix_caching", num_gpu_blocks=len(keys))
    for _ in range(2):
        found = [caching.allocate_immutable(None, A, extra_key=key).block_id for key in keys]
        assert found == list(range(len(keys)))
    with pytest.raises(ValueError, match="list"):
        caching.allocate_immutable(None, A, extra_key=[1])


def test_a_hash_collision_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 4: with all hashes equal, only the comparison of tokens tells contents apart."""

    def same(self: ContentHasher, blocks: np.ndarray, *_: object) -> np.ndarray:
        return np.full(len(blocks), 5, dtype=np.int64)

    monkeypatch.setattr(ContentHasher, "hash_chain", same)
    monkeypatch.setattr(
        ContentHasher, "hash_next", lambda self, parents, positions, blocks: same(self, blocks)
    )
    caching = create("prefix_caching")
    first = caching.allocate_immutable(None, A)
    other = caching.allocate_immutable(None, B)
    mutable = caching.allocate_mutable(None)
    mutable.append_token_ids(C)
    assert ids([first, other, mutable]) == [0, 1, 2]
    assert [block.token_ids.tolist() for block in (first, other, mutable)] == [A, B, C]
    again = caching.allocate_immutable(None, A)
    assert again.block_id == 0
    caching.mark_blocks_as_computed([0, 1, 2])
    assert caching.find_cached_prefix([*A, 0]).tolist() == [0]
    assert caching.find_cached_prefix([*B, 0]).tolist() == []
    for block in (first, other, mutable, again):
        caching.free(block)
    caching.check_integrity()
    assert caching.get_num_free_blocks() == 8


def test_a_full_mutable_block_takes_the_cached_id(caching: CpuGpuBlockAllocator) -> None:
    """Rule 6."""
    cached = caching.allocate_immutable(None, A)
    block = caching.allocate_mutable(None)
    block.append_token_ids(A[:2])
    assert block.block_id == 1
    block.append_token_ids(A[2:])
    assert block.block_id == cached.block_id == 0
    assert caching.allocator(Device.GPU).pool.ref_count[:2].tolist() == [2, 0]
    assert caching.allocate_mutable(None).block_id == 1


def test_promotion_to_an_uncomputed_block_copies_its_kv(caching: CpuGpuBlockAllocator) -> None:
    """The next step reads the cached block, whose prompt may not have been computed by then."""
    cached = caching.allocate_immutable(None, A)
    for computed in (False, True):
        if computed:
            caching.mark_blocks_as_computed([cached.block_id])
        block = caching.allocate_mutable(None)
        own = block.block_id
        block.append_token_ids(A)
        assert block.block_id == cached.block_id
        assert caching.clear_copy_on_writes().tolist() == ([] if computed else [[own, 0]])


def test_one_copy_fills_a_cached_block_that_several_are_promoted_to(
    caching: CpuGpuBlockAllocator,
) -> None:
    """No destination appears twice among a step's copies."""
    cached = caching.allocate_immutable(None, A)
    blocks = [caching.allocate_mutable(None) for _ in range(2)]
    for block in blocks:
        block.append_token_ids(A)
    assert ids(blocks) == [cached.block_id] * 2
    assert caching.clear_copy_on_writes().tolist() == [[1, 0]]


def test_promotion_revives_an_evictable_block(caching: CpuGpuBlockAllocator) -> None:
    compute_and_free(caching, chain_of(caching, A))
    block = caching.allocate_mutable(None)
    block.append_token_ids(A)
    assert block.block_id == 0
    assert block.computed
    assert caching.get_num_free_blocks() == 7
    caching.free(block)
    assert caching.get_num_free_blocks() == 8


def test_copy_then_promotion_leaves_one_copy_to_make(caching: CpuGpuBlockAllocator) -> None:
    """The copied block is given back at once, so that the KV goes from source to cached block."""
    cached = caching.allocate_immutable(None, A)
    block = caching.allocate_mutable(None)
    block.append_token_ids(A[:3])
    [fork] = caching.fork(block)
    fork.append_token_ids(A[3:])
    assert fork.block_id == cached.block_id
    assert caching.clear_copy_on_writes().tolist() == [[block.block_id, cached.block_id]]


def test_uncomputed_content_leaves_the_cache_with_its_block(
    caching: CpuGpuBlockAllocator,
) -> None:
    """Rule 3: its KV was never written."""
    first, second = chain_of(caching, A, B)
    caching.mark_blocks_as_computed([first.block_id])
    caching.free(second)
    caching.free(first)
    assert caching.find_cached_prefix(A + B + C).tolist() == [0]
    assert ids(chain_of(caching, A, B)) == [0, 1]
    assert caching.allocator(Device.GPU).stats.hits == 1


def test_a_partial_block_is_not_computed(caching: CpuGpuBlockAllocator) -> None:
    block = caching.allocate_mutable(None)
    block.append_token_ids(A[:3])
    caching.mark_blocks_as_computed([0])
    block.append_token_ids(A[3:])
    assert not block.computed


def test_a_lookup_changes_nothing_and_leaves_one_token(caching: CpuGpuBlockAllocator) -> None:
    """Rule 5."""
    blocks = chain_of(caching, A, B)
    before = snapshot(caching)
    assert caching.find_cached_prefix(A + B + C).tolist() == []
    assert_unchanged(caching, before)
    caching.mark_blocks_as_computed(ids(blocks))
    assert caching.find_cached_prefix(A + B).tolist() == [0]
    assert caching.find_cached_prefix([*A, *B, 9]).tolist() == [0, 1]
    assert caching.find_cached_prefix(A).tolist() == []
    assert caching.find_cached_prefix([]).tolist() == []
    assert caching.find_cached_prefix(B + A).tolist() == []
    assert caching.find_cached_prefix(A + B + C, extra_key="salt").tolist() == []


def test_a_lookup_stops_at_the_first_gap(caching: CpuGpuBlockAllocator) -> None:
    """Rule 5: a computed block behind one that isn't computed is not found."""
    blocks = chain_of(caching, A, B, C)
    caching.mark_blocks_as_computed([blocks[0].block_id, blocks[2].block_id])
    assert caching.find_cached_prefix(A + B + C + D).tolist() == [0]


def test_common_computed_blocks(caching: CpuGpuBlockAllocator) -> None:
    """Rule 5: one sequence without computed blocks empties the answer."""
    blocks = chain_of(caching, A, B, C)
    other = caching.allocate_immutable(None, D)
    caching.mark_blocks_as_computed([0, 1])
    common = caching.get_common_computed_block_ids
    assert common([[0, 1, 2]]) == [0, 1]
    assert common([[0, 1, 2], [0, 1, other.block_id]]) == [0, 1]
    assert common([[0, 1], [0]]) == [0]
    assert common([[0, 1], [other.block_id]]) == []
    assert common([[0, 1], []]) == []
    assert common([]) == []
    assert ids(blocks) == [0, 1, 2]


# -- with caching: eviction


def evicted_order(caching: CpuGpuBlockAllocator) -> list[int]:
    """Take all blocks one by one; the ids come in the order of eviction."""
    return ids([caching.allocate_mutable(None) for _ in range(caching.get_num_free_blocks())])


def test_a_suffix_is_evicted_before_its_prefix() -> None:
    """Rule 2, case A14."""
    caching = create("prefix_caching", num_gpu_blocks=4)
    compute_and_free(caching, chain_of(caching, A, B, C, D))
    assert evicted_order(caching) == [3, 2, 1, 0]


def test_the_oldest_access_is_evicted_first() -> None:
    """Rule 2: time first, then depth, then the lowest id."""
    caching = create("prefix_caching", num_gpu_blocks=6)
    first = chain_of(caching, A, B)
    second = chain_of(caching, C, D)
    third = chain_of(caching, D, C)
    caching.mark_blocks_as_accessed([0, 1], 2.0)
    caching.mark_blocks_as_accessed([2, 3, 4, 5], 1.0)
    for chain in (third, first, second):
        compute_and_free(caching, chain)
    assert evicted_order(caching) == [3, 5, 2, 4, 1, 0]


def test_fifo_ignores_accesses() -> None:
    caching = create("prefix_caching", num_gpu_blocks=3, evictor="fifo")
    blocks = [caching.allocate_immutable(None, tokens) for tokens in (A, B, C)]
    caching.mark_blocks_as_accessed([0], 9.0)
    for i in (2, 0, 1):
        compute_and_free(caching, [blocks[i]])
    again = caching.allocate_immutable(None, A)
    caching.free(again)
    assert evicted_order(caching) == [0, 1, 2]


def test_uncached_ids_go_before_any_eviction(caching: CpuGpuBlockAllocator) -> None:
    """Rule 1."""
    compute_and_free(caching, chain_of(caching, A, B))
    assert evicted_order(caching) == [2, 3, 4, 5, 6, 7, 1, 0]
    assert caching.allocator(Device.GPU).stats.evictions == 2


def test_a_hit_takes_a_block_off_the_evictor(caching: CpuGpuBlockAllocator) -> None:
    compute_and_free(caching, chain_of(caching, A, B))
    assert caching.get_num_free_blocks() == 8
    held = caching.allocate_immutable(None, A)
    assert held.computed
    assert caching.get_num_free_blocks() == 7
    assert evicted_order(caching) == [2, 3, 4, 5, 6, 7, 1]


def test_an_evicted_block_is_out_of_the_cache() -> None:
    """Case A02: a later prompt must not hit a block that somebody else owns now."""
    caching = create("prefix_caching", num_gpu_blocks=3)
    compute_and_free(caching, [caching.allocate_immutable(None, A)])
    owners = [caching.allocate_mutable(None) for _ in range(3)]
    assert ids(owners) == [1, 2, 0]
    assert len(caching.allocator(Device.GPU).index) == 0
    caching.free(owners[0])
    assert caching.allocate_immutable(None, A).block_id == 1


def test_reset_forgets_content_and_order(caching: CpuGpuBlockAllocator) -> None:
    compute_and_free(caching, chain_of(caching, A, B, C))
    assert caching.reset_prefix_cache()
    assert caching.find_cached_prefix(A + B).tolist() == []
    assert caching.allocator(Device.GPU).stats.lookups == 0
    assert ids(chain_of(caching, A, B, C)) == [0, 1, 2]


# -- with caching: swap


def test_swap_shares_what_is_computed_there(caching: CpuGpuBlockAllocator) -> None:
    blocks = chain_of(caching, A, B)
    caching.mark_blocks_as_computed([0, 1])
    assert caching.swap(blocks, Device.GPU, Device.CPU).tolist() == [[0, 0], [1, 1]]
    # The GPU still caches both: nothing is to be copied back.
    assert caching.get_num_full_blocks_touched(blocks, Device.GPU) == 2
    assert caching.swap(blocks, Device.CPU, Device.GPU).tolist() == []
    assert ids(blocks) == [0, 1]
    assert [block.computed for block in blocks] == [True, True]
    assert caching.get_num_free_blocks(Device.GPU) == 6


def test_swap_does_not_share_what_is_not_computed(caching: CpuGpuBlockAllocator) -> None:
    swapped = chain_of(caching, A)
    caching.swap(swapped, Device.GPU, Device.CPU)
    waiting = chain_of(caching, A)
    assert caching.swap(swapped, Device.CPU, Device.GPU).tolist() == [[0, 1]]
    assert ids(waiting) == [0]
    assert ids(swapped) == [1]


def test_two_blocks_with_one_content_swap_together(caching: CpuGpuBlockAllocator) -> None:
    """Guards against losing count where two blocks meet in one cached block, or are new twice."""
    swapped = chain_of(caching, A)
    caching.swap(swapped, Device.GPU, Device.CPU)
    waiting = chain_of(caching, A)
    caching.swap(swapped, Device.CPU, Device.GPU)
    both = [*waiting, *swapped]
    caching.mark_blocks_as_computed(ids(both))
    # Neither is on the CPU: both move, and one of them is cached there.
    assert caching.swap(both, Device.GPU, Device.CPU).tolist() == [[0, 0], [1, 1]]
    cpu = caching.allocator(Device.CPU)
    assert len(cpu.index) == 1
    # The GPU caches the content once, and evictable: both become that block.
    assert caching.get_num_full_blocks_touched(both, Device.GPU) == 1
    assert caching.swap(both, Device.CPU, Device.GPU).tolist() == []
    assert ids(both) == [0, 0]
    assert caching.allocator(Device.GPU).pool.ref_count[0] == 2
    for block in both:
        caching.free(block)
    caching.check_integrity()
    assert caching.get_num_free_blocks(Device.GPU) == 8


def test_a_block_in_prefill_stays_so_through_a_swap(caching: CpuGpuBlockAllocator) -> None:
    """Guards against a promotion without a copy to a block whose KV was never written."""
    swapped = chain_of(caching, A)
    caching.swap(swapped, Device.GPU, Device.CPU)
    caching.swap(swapped, Device.CPU, Device.GPU)
    block = caching.allocate_mutable(None)
    block.append_token_ids(A)
    assert block.block_id == swapped[0].block_id == 0
    assert caching.clear_copy_on_writes().tolist() == [[1, 0]]


def test_a_computed_block_swapped_to_a_prefill_id_is_not_copied_into(
    caching: CpuGpuBlockAllocator,
) -> None:
    """Guards against the mark that the id's last owner, freed during its prefill, has left."""
    blocks = chain_of(caching, A, device=Device.CPU)
    caching.mark_blocks_as_computed([0], Device.CPU)
    [freed] = chain_of(caching, B)
    caching.free(freed)
    caching.swap(blocks, Device.CPU, Device.GPU)
    assert blocks[0].block_id == 0
    block = caching.allocate_mutable(None)
    block.append_token_ids(A)
    assert block.block_id == 0
    assert caching.clear_copy_on_writes().tolist() == []


def test_a_swap_names_each_block_once_and_two_devices() -> None:
    """A block given twice must not cost a block of the other device."""
    allocator = CpuGpuBlockAllocator.create("prefix_caching", 4, 4, 4)
    block = allocator.allocate_immutable(None, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="twice"):
        allocator.swap([block, block], Device.GPU, Device.CPU)
    with pytest.raises(ValueError, match="both"):
        allocator.swap([block], Device.GPU, Device.GPU)
    assert allocator.get_num_free_blocks(Device.CPU) == 4
    assert len(allocator.swap([block], Device.GPU, Device.CPU)) == 1


def test_a_table_takes_over_one_linked_chain_of_its_own_allocator() -> None:
    """Blocks that are not linked would let the KV of one prefix be hit for another."""
    allocator = CpuGpuBlockAllocator.create("prefix_caching", 8, 0, 4)
    first = allocator.allocate_immutable(None, [1] * 4)
    second = allocator.allocate_immutable(first, [2] * 4)
    other = allocator.allocate_immutable(None, [3] * 4)
    with pytest.raises(ValueError, match="one chain"):
        BlockTable(4, allocator, [other, second])
    with pytest.raises(ValueError, match="its allocator"):
        BlockTable(4, CpuGpuBlockAllocator.create("naive", 8, 0, 4), [first, second])
    assert BlockTable(4, allocator, [first, second]).physical_block_ids == [0, 1]
