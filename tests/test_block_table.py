"""BlockTable: its surface, by example, with both allocators."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_table import BlockTable
from cache.cpu_gpu import CpuGpuBlockAllocator
from cache.interfaces import Device, NoFreeBlocksError
from tests.snapshot import assert_unchanged, snapshot

BLOCK_SIZE = 4


def create(kind: str = "naive", num_blocks: int = 8, **options: object) -> CpuGpuBlockAllocator:
    return CpuGpuBlockAllocator.create(
        kind, num_blocks, num_blocks, BLOCK_SIZE, hash_seed=7, **options
    )


@pytest.fixture(params=["naive", "prefix_caching"])
def allocator(request: pytest.FixtureRequest) -> CpuGpuBlockAllocator:
    return create(request.param)


def table_of(allocator: CpuGpuBlockAllocator, *tokens: int, **options: object) -> BlockTable:
    table = BlockTable(BLOCK_SIZE, allocator)
    table.allocate(tokens, **options)
    return table


def held(table: BlockTable) -> list[list[int]]:
    return [block.token_ids.tolist() for block in table.blocks]


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 33])
@pytest.mark.parametrize("ahead", [0, 1, 16])
def test_required_blocks(block_size: int, num_tokens: int, ahead: int) -> None:
    required = BlockTable.get_num_required_blocks(range(num_tokens), block_size, ahead)
    assert (required - 1) * block_size < max(num_tokens + ahead, 0) <= required * block_size


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 8, 11])
def test_allocate(allocator: CpuGpuBlockAllocator, num_tokens: int) -> None:
    table = table_of(allocator, *range(num_tokens))
    num_blocks = BlockTable.get_num_required_blocks(range(num_tokens), BLOCK_SIZE)
    assert table.physical_block_ids == list(range(num_blocks))
    assert [token for block in held(table) for token in block] == list(range(num_tokens))
    assert table.num_full_slots == num_tokens
    assert table.device is Device.GPU
    assert allocator.get_num_free_blocks() == 8 - num_blocks
    allocator.check_integrity()


def test_allocate_on_the_cpu(allocator: CpuGpuBlockAllocator) -> None:
    table = table_of(allocator, 1, 2, 3, 4, 5, device=Device.CPU)
    assert table.device is Device.CPU
    assert allocator.get_num_free_blocks(Device.CPU) == 6
    assert allocator.get_num_free_blocks(Device.GPU) == 8
    with pytest.raises(ValueError, match="swapped out"):
        table.append_token_ids([6])
    with pytest.raises(ValueError, match="swapped out"):
        table.ensure_num_empty_slots(9)
    table.free()
    assert allocator.get_num_free_blocks(Device.CPU) == 8


def test_a_table_without_blocks(allocator: CpuGpuBlockAllocator) -> None:
    table = BlockTable(BLOCK_SIZE, allocator)
    assert table.physical_block_ids == []
    assert table.blocks == []
    assert table.num_full_slots == 0
    assert table.get_unseen_token_ids([1, 2]).tolist() == [1, 2]
    for action in (table.free, table.fork, lambda: table.append_token_ids([1])):
        with pytest.raises(ValueError, match="no blocks yet"):
            action()


@pytest.mark.parametrize("extra_key", [None, "salt"])
def test_allocated_twice_is_refused(allocator: CpuGpuBlockAllocator, extra_key: object) -> None:
    table = table_of(allocator, 1, 2, extra_key=extra_key)
    before = snapshot(allocator)
    with pytest.raises(ValueError, match="allocated before"):
        table.allocate([1])
    assert_unchanged(allocator, before)


def test_a_freed_table_is_of_no_use(allocator: CpuGpuBlockAllocator) -> None:
    """Case A24, rule 14: a second free, an append to a freed table."""
    table = table_of(allocator, 1, 2, 3, 4, 5)
    table.free()
    assert table.physical_block_ids == []
    assert allocator.get_num_free_blocks() == 8
    before = snapshot(allocator)
    for action in (
        table.free,
        table.fork,
        lambda: table.append_token_ids([1]),
        lambda: table.ensure_num_empty_slots(1),
    ):
        with pytest.raises(ValueError, match="freed"):
            action()
    with pytest.raises(ValueError, match="allocated before"):
        table.allocate([1])
    assert_unchanged(allocator, before)


def test_a_table_is_released_last_block_first(allocator: CpuGpuBlockAllocator) -> None:
    """So the next ids handed out are its blocks from the first on."""
    first, second = table_of(allocator, *range(9)), table_of(allocator, *range(50, 54))
    first.free()
    third = table_of(allocator, *range(100, 116))
    assert third.physical_block_ids == [0, 1, 2, 4]
    assert second.physical_block_ids == [3]


@pytest.mark.parametrize("tokens", [[-1], [2**31], [0.5], [[1]]])
def test_bad_tokens_change_nothing(allocator: CpuGpuBlockAllocator, tokens: list) -> None:
    table = table_of(allocator, 1)
    before = snapshot(allocator)
    with pytest.raises(ValueError, match=r"."):
        table.append_token_ids(tokens)
    with pytest.raises(ValueError, match=r"."):
        BlockTable(BLOCK_SIZE, allocator).allocate(tokens)
    assert_unchanged(allocator, before)


def test_what_does_not_fit_changes_nothing(allocator: CpuGpuBlockAllocator) -> None:
    """Rule 8."""
    table = table_of(allocator, *range(27))
    fresh = BlockTable(BLOCK_SIZE, allocator)
    before = snapshot(allocator)
    for action in (
        lambda: table.append_token_ids(range(6)),
        lambda: table.append_token_ids([1], num_lookahead_slots=5),
        lambda: table.ensure_num_empty_slots(6),
        lambda: fresh.allocate(range(100, 105)),
        lambda: fresh.ensure_num_empty_slots(5),
    ):
        with pytest.raises(NoFreeBlocksError):
            action()
        assert_unchanged(allocator, before)
    assert fresh.physical_block_ids == []
    fresh.ensure_num_empty_slots(4)
    assert fresh.physical_block_ids == [7]


def test_append_fills_and_grows(allocator: CpuGpuBlockAllocator) -> None:
    table = table_of(allocator, 0, 1)
    table.append_token_ids([2])
    assert table.physical_block_ids == [0]
    table.append_token_ids(np.arange(3, 10))
    assert table.physical_block_ids == [0, 1, 2]
    table.append_token_ids([])
    assert held(table) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert table.num_full_slots == 10
    assert table.get_unseen_token_ids(range(12)).tolist() == [10, 11]
    assert table.get_unseen_token_ids(range(10)).tolist() == []


def test_lookahead_slots_are_taken_once(allocator: CpuGpuBlockAllocator) -> None:
    table = table_of(allocator, 0, 1)
    table.append_token_ids([2], num_lookahead_slots=6)
    assert table.physical_block_ids == [0, 1, 2]
    assert held(table) == [[0, 1, 2], [], []]
    table.append_token_ids([3, 4], num_lookahead_slots=4)
    assert table.physical_block_ids == [0, 1, 2]
    table.append_token_ids([5], num_lookahead_slots=7)
    assert table.physical_block_ids == [0, 1, 2, 3]
    assert held(table) == [[0, 1, 2, 3], [4, 5], [], []]
    with pytest.raises(ValueError, match="num_lookahead_slots is -1"):
        table.append_token_ids([6], num_lookahead_slots=-1)


def test_ensure_num_empty_slots(allocator: CpuGpuBlockAllocator) -> None:
    table = table_of(allocator, 0, 1)
    for wanted, num_blocks in [(0, 1), (2, 1), (3, 2), (6, 2), (7, 3), (1, 3)]:
        table.ensure_num_empty_slots(wanted)
        assert len(table.physical_block_ids) == num_blocks
    assert table.num_full_slots == 2


def test_ensure_num_empty_slots_on_a_table_without_blocks(
    allocator: CpuGpuBlockAllocator,
) -> None:
    table = BlockTable(BLOCK_SIZE, allocator)
    table.ensure_num_empty_slots(5)
    assert table.physical_block_ids == [0, 1]
    table.append_token_ids(range(6))
    assert held(table) == [[0, 1, 2, 3], [4, 5]]
    allocator.check_integrity()
    table.free()
    assert allocator.get_num_free_blocks() == 8


def test_ensuring_no_slots_copies_nothing(allocator: CpuGpuBlockAllocator) -> None:
    table = table_of(allocator, 0, 1)
    other = table.fork()
    other.ensure_num_empty_slots(6)
    assert other.physical_block_ids == [0, 1]
    assert allocator.clear_copy_on_writes().tolist() == []


@pytest.mark.parametrize("num_tokens", [0, 2, 3, 4, 7])
@pytest.mark.parametrize("num_new", [0, 1, 2, 5])
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_blocks_touched_by_append(num_tokens: int, num_new: int, ahead: int) -> None:
    """By its definition: the blocks that the new slots lie in."""
    table = table_of(create(), *range(num_tokens))
    slots = range(num_tokens, num_tokens + num_new + ahead)
    touched = table.get_num_blocks_touched_by_append_slots(list(range(num_new)), ahead)
    assert touched == len({slot // BLOCK_SIZE for slot in slots})


def test_fork_and_copy_on_write(allocator: CpuGpuBlockAllocator) -> None:
    table = table_of(allocator, *range(6))
    other = table.fork()
    assert other.physical_block_ids == table.physical_block_ids == [0, 1]
    other.append_token_ids([6, 7, 8])
    assert allocator.clear_copy_on_writes().tolist() == [[1, 2]]
    assert other.physical_block_ids == [0, 2, 3]
    assert held(other) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert held(table) == [[0, 1, 2, 3], [4, 5]]
    # Having been copied for the other, the block is the table's own.
    table.append_token_ids([9])
    assert allocator.clear_copy_on_writes().tolist() == []
    assert table.physical_block_ids == [0, 1]
    table.free()
    assert held(other) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    other.free()
    assert allocator.get_num_free_blocks() == 8


def test_a_fork_after_an_append_shares_again(allocator: CpuGpuBlockAllocator) -> None:
    """Guards against what a table remembers of its last block: private before, shared now."""
    table = table_of(allocator, 0)
    rows = np.array([table._row])
    allocator.tables.append(rows, np.array([1], dtype=np.int32))
    other = table.fork()
    allocator.tables.append(rows, np.array([2], dtype=np.int32))
    assert allocator.clear_copy_on_writes().tolist() == [[0, 1]]
    allocator.tables.append(np.array([other._row]), np.array([3], dtype=np.int32))
    assert held(table) == [[0, 1, 2]]
    assert held(other) == [[0, 1, 3]]
    allocator.check_integrity()


def test_a_swapped_table_forgets_its_next_slot(allocator: CpuGpuBlockAllocator) -> None:
    """Guards against writing to the slot that the table had before it was swapped out."""
    blocker = table_of(allocator, *range(50, 54))
    table = table_of(allocator, 0)
    rows = np.array([table._row])
    allocator.tables.append(rows, np.array([1], dtype=np.int32))
    assert allocator.tables.swap(rows, Device.GPU, Device.CPU).tolist() == [[1, 0]]
    allocator.check_integrity()
    blocker.free()
    assert allocator.tables.swap(rows, Device.CPU, Device.GPU).tolist() == [[0, 0]]
    allocator.tables.append(rows, np.array([2], dtype=np.int32))
    assert held(table) == [[0, 1, 2]]
    allocator.check_integrity()


def test_copies_of_tables_are_withdrawn_with_their_blocks(allocator: CpuGpuBlockAllocator) -> None:
    """Rule 7."""
    table = table_of(allocator, 0, 1)
    other, third = table.fork(), table.fork()
    other.append_token_ids([2])
    third.append_token_ids([3])
    other.free()
    assert allocator.clear_copy_on_writes().tolist() == [[0, 2]]


def test_views_follow_the_table(allocator: CpuGpuBlockAllocator) -> None:
    table = table_of(allocator, *range(9))
    last = table.blocks[-1]
    assert last.prev_block.block_id == 1
    assert last.prev_block.prev_block.prev_block is None
    assert last.num_tokens_total == 9
    table.append_token_ids([9])
    assert last.token_ids.tolist() == [8, 9]


def test_a_table_takes_over_standalone_blocks(allocator: CpuGpuBlockAllocator) -> None:
    first = allocator.allocate_immutable(None, [1, 2, 3, 4], extra_key="salt")
    tail = allocator.allocate_mutable(first)
    tail.append_token_ids([5])
    table = BlockTable(BLOCK_SIZE, allocator, _blocks=[first, tail])
    assert table.physical_block_ids == [0, 1]
    assert table.num_full_slots == 5
    allocator.check_integrity()
    for block in (first, tail):
        with pytest.raises(ValueError, match="belongs to a block table"):
            allocator.free(block)
    table.append_token_ids([6, 7, 8])
    # The hash of what has filled since hangs on the extra key of the first block.
    allocator.mark_blocks_as_computed([0, 1])
    found = allocator.find_cached_prefix(range(1, 10), extra_key="salt").tolist()
    assert found in ([], [0, 1])
    assert (found == []) == (table.blocks[1].content_hash is None)
    assert allocator.find_cached_prefix(range(1, 10)).tolist() == []
    table.free()
    assert allocator.get_num_free_blocks() == 8


def test_a_table_refuses_other_blocks(allocator: CpuGpuBlockAllocator) -> None:
    table = table_of(allocator, *range(8))
    partial = allocator.allocate_mutable(None)
    partial.append_token_ids([1])
    behind = allocator.allocate_mutable(partial)
    freed = allocator.allocate_mutable(None)
    allocator.free(freed)
    first = allocator.allocate_immutable(None, [9, 9, 9, 9])
    second = allocator.allocate_immutable(first, [8, 8, 8, 8])
    on_cpu = allocator.allocate_immutable(None, [9, 9, 9, 9], Device.CPU)
    before = snapshot(allocator)
    for blocks, message in (
        (table.blocks, "standalone"),
        ([freed], "standalone"),
        ([partial, behind], "must be full"),
        ([second, first], "one chain"),
        ([second], "one chain"),
        ([first, on_cpu], "one chain"),
    ):
        with pytest.raises(ValueError, match=message):
            BlockTable(BLOCK_SIZE, allocator, _blocks=blocks)
    assert_unchanged(allocator, before)


def test_bad_arguments_are_named(allocator: CpuGpuBlockAllocator) -> None:
    with pytest.raises(ValueError, match="block_size is 5; the allocator has 4"):
        BlockTable(5, allocator)
    with pytest.raises(ValueError, match="null block"):
        BlockTable(BLOCK_SIZE, allocator, max_block_sliding_window=2)


def test_a_window_drops_blocks_behind_it() -> None:
    """Rule 12: a window of 5 tokens is known as 5 // 4 + 1 = 2 blocks."""
    allocator = create(reserve_null_block=True)
    table = BlockTable(BLOCK_SIZE, allocator, max_block_sliding_window=2)
    table.allocate(range(12))
    assert table.physical_block_ids == [1, 2, 3]
    table.append_token_ids([12])
    assert table.physical_block_ids == [1, 2, 3, 4]
    table.append_token_ids([13], num_computed_slots=9)
    assert table.physical_block_ids == [1, 2, 3, 4]
    # The query at position 10 sees keys from 6 on: the first block is not needed any more.
    table.append_token_ids([], num_computed_slots=10)
    assert table.physical_block_ids == [0, 2, 3, 4]
    assert held(table) == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
    other = table.fork()
    assert other.physical_block_ids == [0, 2, 3, 4]
    # What is dropped is free after the append, not for it.
    other.append_token_ids([14, 15, 16], num_computed_slots=14)
    assert allocator.clear_copy_on_writes().tolist() == [[4, 1]]
    assert other.physical_block_ids == [0, 0, 3, 1, 5]
    assert table.physical_block_ids == [0, 2, 3, 4]
    allocator.check_integrity()
    other.free()
    table.free()
    assert allocator.get_num_free_blocks() == 7


@pytest.mark.parametrize("computed", [-1, 6, 2.0])
def test_computed_slots_beyond_the_tokens_are_refused(computed: object) -> None:
    """Guards against dropping the block that is written next."""
    allocator = create(reserve_null_block=True)
    table = BlockTable(BLOCK_SIZE, allocator, max_block_sliding_window=1)
    table.allocate(range(4))
    before = snapshot(allocator)
    with pytest.raises(ValueError, match=f"num_computed_slots is {computed}"):
        table.append_token_ids([1], num_computed_slots=computed)
    assert_unchanged(allocator, before)
    table.append_token_ids([1], num_computed_slots=5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 5), st.booleans()),
        max_size=25,
    )
)
def test_many_tables_hold_their_own_tokens(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    """Appends, forks and frees at random: each table reads back what went in."""
    allocator = create("prefix_caching", num_blocks=40)
    tables: list[tuple[BlockTable, list[int]]] = []
    for kind, number, ahead, bit in steps:
        if not tables or kind == 0:
            tokens = [int(bit)] * number
            tables.append((table_of(allocator, *tokens), tokens))
        table, tokens = tables[number % len(tables)]
        if kind == 1:
            table.append_token_ids([int(bit)] * ahead, num_lookahead_slots=number % 3)
            tokens += [int(bit)] * ahead
        elif kind == 2:
            tables.append((table.fork(), tokens.copy()))
        elif kind == 3:
            table.free()
            tables = [pair for pair in tables if pair[0] is not table]
        allocator.clear_copy_on_writes()
        allocator.check_integrity()
        for table, tokens in tables:
            assert [token for block in held(table) for token in block] == tokens
    for table, _ in tables:
        table.free()
    assert allocator.get_num_free_blocks() == 40
