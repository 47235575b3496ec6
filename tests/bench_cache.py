"""How fast is the block manager, beside a plain-Python model of the same rules?

    make bench-cache

Each workload runs on the manager and, smaller, on the model in `cache_model`; both must come to the
same state before a figure is printed. The figure is the median of 5 rounds on fresh managers, the
ratio is to the model measured in the same run. Block size 16 throughout, one thread.
"""

import functools
import resource
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from cache.block_manager import BlockSpaceManager
from cache.block_pool import BlockPool
from cache.evictors.lru import LRUEvictor
from cache.sequence import Sequence, SequenceGroup, SequenceStatus
from tests.cache_model import CacheModel

BLOCK_SIZE = 16
ROUNDS = 5


class Prepared(NamedTuple):
    """One round: what is timed, how many units it is, and a summary of the state afterwards."""

    run: Callable[[], object]
    num_units: int
    summary: Callable[[], object]


def prompts(count: int, num_tokens: int, num_shared: int) -> list[np.ndarray]:
    """Prompts of random tokens, int32, with `num_shared` tokens in common."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1 << 17, (count, num_tokens), dtype=np.int32)
    tokens[:, :num_shared] = tokens[0, :num_shared]
    return list(tokens)


def groups_of(tokens: list[np.ndarray]) -> list[SequenceGroup]:
    return [SequenceGroup(i, [Sequence(i, prompt)]) for i, prompt in enumerate(tokens)]


def table_of(manager: BlockSpaceManager | CacheModel, seq_id: int) -> list[int]:
    if isinstance(manager, CacheModel):
        return manager.block_table(seq_id)
    return manager.tables.block_ids(manager._row_of[seq_id]).tolist()


def new_manager(is_model: bool, num_gpu: int, num_cpu: int, caching: bool) -> object:
    kind = CacheModel if is_model else BlockSpaceManager
    return kind(BLOCK_SIZE, num_gpu, num_cpu, 0.0, None, caching)


def allocate(is_model: bool, count: int, caching: bool) -> Prepared:
    """Into an empty pool. Its memory is warm: it held the prompts of the round before."""
    tokens = prompts(count, 4096, 2048)
    if is_model:
        manager = new_manager(is_model, 256 * count, 0, caching)
        lists = [prompt.tolist() for prompt in tokens]

        def run() -> None:
            for i, prompt in enumerate(lists):
                manager.allocate([i], prompt)
    else:
        manager = _warm_manager(256 * count, caching)
        groups = groups_of(tokens)

        def run() -> None:
            for group in groups:
                manager.allocate(group)

    return Prepared(run, 256 * count, lambda: [table_of(manager, i) for i in range(10)])


@functools.cache
def _built_manager(num_blocks: int, caching: bool) -> BlockSpaceManager:
    return new_manager(False, num_blocks, 0, caching)


def _warm_manager(num_blocks: int, caching: bool) -> BlockSpaceManager:
    """The manager of this size, emptied."""
    manager = _built_manager(num_blocks, caching)
    manager.free_many([Sequence(seq_id, [0]) for seq_id in manager._row_of])
    assert manager.reset_prefix_cache()
    return manager


def append(is_model: bool, num_steps: int, staggered: bool) -> Prepared:
    """256 sequences; staggered, a sixteenth of them fills a block in each step."""
    rng = np.random.default_rng(1)
    tokens = [
        rng.integers(0, 1 << 17, 160 + (i % BLOCK_SIZE if staggered else 0), dtype=np.int32)
        for i in range(256)
    ]
    new = rng.integers(0, 1 << 17, (num_steps, 256), dtype=np.int32)
    manager = new_manager(is_model, 256 * (12 + num_steps // BLOCK_SIZE), 0, True)
    if is_model:
        for i, prompt in enumerate(tokens):
            manager.allocate([i], prompt.tolist())
        steps = [[(i, [t]) for i, t in enumerate(row)] for row in new.tolist()]

        def run() -> None:
            for step in steps:
                manager.append(step)
    else:
        groups = groups_of(tokens)
        for group in groups:
            manager.allocate(group)
        rows = manager.rows_of([group.seqs[0] for group in groups])

        def run() -> None:
            for step in new:
                manager.append_slots_batch(rows, step)

    return Prepared(run, 256 * num_steps, lambda: [table_of(manager, i)[:12] for i in range(256)])


def evict(is_model: bool, count: int) -> Prepared:
    """Prompts of 256 blocks into a pool of 8,192 that is full of cached, computed ones."""
    tokens = prompts(32 + count, 4096, 0)
    manager = new_manager(is_model, 8192, 0, True)
    groups = groups_of(tokens)
    for i in range(32):
        if is_model:
            manager.allocate([i], tokens[i].tolist())
            manager.mark_computed([i])
            manager.access(i, i)
            manager.free([i])
        else:
            manager.allocate(groups[i])
            manager.mark_blocks_as_computed(groups[i])
            manager.access_all_blocks_in_seq(groups[i].seqs[0], i)
            manager.free(groups[i].seqs[0])
    if is_model:
        lists = [prompt.tolist() for prompt in tokens]

        def run() -> None:
            for i in range(32, 32 + count):
                manager.allocate([i], lists[i])
    else:

        def run() -> None:
            for group in groups[32:]:
                manager.allocate(group)

    return Prepared(run, 256 * count, lambda: [table_of(manager, 32 + i) for i in range(4)])


def fork(is_model: bool, count: int) -> Prepared:
    """64 children at a time of a parent of 63 blocks: fork, write once, free."""
    parent = prompts(1, 63 * BLOCK_SIZE - 5, 0)[0]
    manager = new_manager(is_model, 1024, 0, True)
    batches = [range(1 + 64 * j, 65 + 64 * j) for j in range(count // 64)]
    copies: list[object] = []
    if is_model:
        manager.allocate([0], parent.tolist())

        def run() -> None:
            for batch in batches:
                manager.fork(0, batch)
                copies.append(len(manager.append([(i, [i % 64]) for i in batch])))
                manager.free(batch)
    else:
        group = groups_of([parent])[0]
        manager.allocate(group)
        children = [[Sequence(i, [0]) for i in batch] for batch in batches]
        new = np.arange(1, 65, dtype=np.int32) % 64

        def run() -> None:
            for batch in children:
                rows = manager.fork_many(group.seqs[0], batch)
                copies.append(len(manager.append_slots_batch(rows, new)))
                manager.free_many(batch)

    return Prepared(run, 64 * len(batches), lambda: (copies[:2], table_of(manager, 0)))


def find(is_model: bool, count: int) -> Prepared:
    """Look up one prompt of 4,096 cached and computed tokens."""
    tokens = prompts(1, 4096, 0)[0]
    manager = new_manager(is_model, 512, 0, True)
    found: list[object] = []
    if is_model:
        as_list = tokens.tolist()
        manager.allocate([0], as_list)
        manager.mark_computed([0])

        def run() -> None:
            for _ in range(count):
                result = manager.find_cached_prefix(as_list)
            found.append(result)
    else:
        group = groups_of([tokens])[0]
        manager.allocate(group)
        manager.mark_blocks_as_computed(group)

        def run() -> None:
            for _ in range(count):
                result = manager.allocator.find_cached_prefix(tokens)
            found.append(result.tolist())

    return Prepared(run, count, lambda: found[0])


def swap(is_model: bool, count: int) -> Prepared:
    """Swap a sequence of 64 blocks out and in; nothing of it is cached where it goes."""
    tokens = prompts(1, 64 * BLOCK_SIZE, 0)[0]
    manager = new_manager(is_model, 8192, 8192, False)
    pairs: list[int] = []
    if is_model:
        manager.allocate([0], tokens.tolist())

        def run() -> None:
            for _ in range(count):
                pairs.append(len(manager.swap_out([0])) + len(manager.swap_in([0])))
    else:
        group = groups_of([tokens])[0]
        manager.allocate(group)
        group.seqs[0].status = SequenceStatus.RUNNING

        def run() -> None:
            for _ in range(count):
                pairs.append(len(manager.swap_out(group)) + len(manager.swap_in(group)))

    return Prepared(run, 128 * count, lambda: (pairs[0], table_of(manager, 0)))


def build(num_blocks: int) -> Prepared:
    """An empty manager. The operating system hands out its memory on first touch."""
    return Prepared(lambda: new_manager(False, num_blocks, 0, True), num_blocks, lambda: None)


class Workload(NamedTuple):
    """A row of the table."""

    unit: str
    reach: float  # units a second
    ours: Callable[[], Prepared]
    model: Callable[[], Prepared] | None
    """None where the model has nothing to do."""


WORKLOADS = {
    "allocate 4,096-token prompts, half shared": Workload(
        "blocks", 4e6, lambda: allocate(False, 1000, True), lambda: allocate(True, 40, True)
    ),
    "the same, caching off": Workload(
        "blocks", 20e6, lambda: allocate(False, 1000, False), lambda: allocate(True, 40, False)
    ),
    "append to 256 sequences, in step": Workload(
        "appends", 8e6, lambda: append(False, 200, False), lambda: append(True, 32, False)
    ),
    "append to 256 sequences, staggered": Workload(
        "appends", 8e6, lambda: append(False, 200, True), lambda: append(True, 32, True)
    ),
    "allocate where every block evicts": Workload(
        "blocks", 3e6, lambda: evict(False, 32), lambda: evict(True, 8)
    ),
    "fork 63 blocks, write once, free": Workload(
        "children", 60e3, lambda: fork(False, 1280), lambda: fork(True, 128)
    ),
    "look up a cached 4,096-token prompt": Workload(
        "prompts", 40e3, lambda: find(False, 2000), lambda: find(True, 100)
    ),
    "swap 64 blocks out and in": Workload(
        "blocks", 1e6, lambda: swap(False, 500), lambda: swap(True, 20)
    ),
    "build a manager of 1,000,000 blocks": Workload("blocks", 50e6, lambda: build(1_000_000), None),
}
_table: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _print_table() -> Iterator[None]:
    yield
    print(f"\n\n{'workload':<42}{'a second':>14} {'reach':>8}  {'model':>8}  ratio to model")
    print("\n".join(_table))


def _figure(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value / 1e3:.1f} k"


@pytest.mark.parametrize("name", WORKLOADS)
def test_manager(benchmark: BenchmarkFixture, name: str) -> None:
    """Time one workload; see the module's docstring."""
    workload = WORKLOADS[name]
    rounds: list[Prepared] = []

    def setup() -> None:
        rounds.append(workload.ours())

    benchmark.pedantic(lambda: rounds[-1].run(), setup=setup, rounds=ROUNDS, warmup_rounds=1)
    ours = rounds[-1].num_units / benchmark.stats.stats.median
    line = f"{name:<42}{_figure(ours) + ' ' + workload.unit:>17} {_figure(workload.reach):>8}"
    if workload.model is not None:
        theirs = _model_speed(workload.model, rounds[-1].summary())
        line += f"  {_figure(theirs):>8}  {ours / theirs:8.1f}"
    _table.append(line)


def _model_speed(prepare: Callable[[], Prepared], expected: object) -> float:
    """Units a second, the median of 3; the model must come to the expected state."""
    seconds = []
    for _ in range(3):
        model = prepare()
        start = time.perf_counter()
        model.run()
        seconds.append(time.perf_counter() - start)
        assert model.summary() == expected
    return model.num_units / sorted(seconds)[1]


@pytest.mark.parametrize("num_blocks", [10_000, 50_000, 1_000_000])
def test_evict_64(benchmark: BenchmarkFixture, num_blocks: int) -> None:
    """64 evictions out of a full pool; the time must not grow with the pool."""
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    evictor = LRUEvictor(pool)
    pool.last_accessed[:] = np.arange(num_blocks) // 256
    pool.depth[:] = np.arange(num_blocks) % 256
    for start in range(0, num_blocks, 256):
        evictor.add(np.arange(start, min(start + 256, num_blocks), dtype=np.int32))
    benchmark.pedantic(evictor.evict, args=(64,), rounds=50, warmup_rounds=2)
    micros = benchmark.stats.stats.median * 1e6
    _table.append(f"evict 64 of {num_blocks:,} cached blocks: {micros:.0f} us (reach 200)")


def test_memory_of_a_million_blocks() -> None:
    """Address space that the arrays of a manager take, touched or not."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    manager = BlockSpaceManager(BLOCK_SIZE, 1_000_000, 0, enable_caching=True)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    owners = (manager._gpu.pool, manager._gpu.index, manager._gpu.evictor)
    arrays = {id(a): a for owner in owners for a in vars(owner).values() if _owns_memory(a)}
    megabytes = sum(a.nbytes for a in arrays.values()) / 1e6
    _table.append(
        f"1,000,000 blocks: {megabytes:.0f} MB of arrays, {resident / 1e3:.0f} MB resident when "
        "built (reach 200)"
    )


def _owns_memory(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.base is None
