"""Eviction policies: victim orders worked by hand from the papers, and what every policy must hold.

A policy that is new is taken up by the shared tests without a change here.
"""

from collections import deque
from collections.abc import Sized

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_manager import BlockSpaceManager
from cache.block_pool import BlockPool
from cache.evictor import POLICIES, Evictor, Future, Policy, make_evictor, make_policy
from cache.evictors.cost_aware import EQUAL_COST_TOKENS
from cache.evictors.wtinylfu import MAX_COUNT, FrequencySketch
from cache.interfaces import AllocStatus
from cache.sequence import Sequence, SequenceGroup, SequenceStatus

NAMES = sorted(POLICIES)
every_policy = pytest.mark.parametrize("name", NAMES)


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def serve(policy: Policy, uses: str, capacity: int, future: Future | None = None) -> str:
    """Look letters up in a cache of `capacity` letters; return the victims in order."""
    cached: set[str] = set()
    victims = ""
    for time, letter in enumerate(uses):
        key = ord(letter)
        if future is not None:
            future.now = time
        if letter in cached:
            policy.hit(key)
            continue
        if len(cached) == capacity:
            victim = chr(policy.evict(key))
            cached.remove(victim)
            victims += victim
        policy.insert(key)
        cached.add(letter)
    return victims


@pytest.mark.parametrize(
    ("name", "capacity", "uses", "victims"),
    [
        # a was used after b and c when d comes; c goes before it when b comes back.
        ("lru", 3, "abcadbe", "bca"),
        # Neither hit saves a or b.
        ("fifo", 3, "abcadbe", "ab"),
        # d: a and b were hit and go behind c, which leaves. e: a has had its chance. f: so has d's
        # neighbour b, hit again, but not d.
        ("clock", 3, "abcabdebf", "cad"),
        # Used once: c, then d. Then a and b have two uses each, and a's are older.
        ("lfu", 3, "aabbcdeeef", "cda"),
        # b leaves with rank 1, so c enters with 1 + 1; it leaves, so d enters with 2 + 1, no less
        # than a after three uses, and a has been there longer.
        ("lfu_aging", 2, "aaabcde", "bca"),
        # d: the hand spares a and b and takes c, the newest; back at the old end it takes a, then
        # b. g: it spares d, takes e and stands at f, which goes next though d is older.
        ("sieve", 3, "abcabdefdgh", "cabef"),
        # A small queue of 1 and a main queue of 2. d: a and b were hit twice and move to main, c
        # leaves. c is remembered, so it enters main, and d makes room. e: small is empty, and main
        # gives up a. b is hit. f, e: small gives up e, then f, and e is remembered. g: main spares
        # b, hit once, and gives up c.
        ("s3fifo", 3, "abcaabbdcebfeg", "cdaefc"),
        # One hit in the small queue is not enough: a leaves all the same.
        ("s3fifo", 3, "abcabcd", "a"),
        # d: t1 = [b c] is above its target 0 and loses b. b was lost too early: the target becomes
        # 1, t1 loses c, b enters t2 = [a b]. e: t1 = [d] is at its target, so t2 loses a. a was
        # lost too early: the target becomes 0, and t1 = [d e] loses d. f: t1 loses e.
        ("arc", 3, "abcadbeaf", "bcade"),
        # Where t1 fills the cache, what leaves is not remembered: a comes back as a newcomer, and
        # with b it makes t1 full again.
        ("arc", 3, "abcdae", "abc"),
        # A window of 1 before a main cache of 3. e: d leaves the window and is no more frequent
        # than a, so it goes. d again: e goes likewise. f: d has two uses now, so a goes.
        ("wtinylfu", 4, "abcdedf", "dea"),
        # Hits protect b, c and d, in a segment of 2: b falls back to probation, but g's f has one
        # use and b two. h: c's second hit does not matter; g goes.
        ("wtinylfu", 4, "abcdedfbcdgch", "deafg"),
        # d: c is used last, e: d; then a and b are never used again, and a is the older.
        ("belady", 3, "abcdabeabcde", "cdab"),
    ],
)
def test_victims_by_hand(name: str, capacity: int, uses: str, victims: str) -> None:
    future = Future([ord(letter)] for letter in uses) if name == "belady" else None
    assert serve(make_policy(name, capacity, future=future), uses, capacity, future) == victims


def test_length_aware_by_hand() -> None:
    """Of those used once the deepest goes first; more uses come before depth."""
    policy = make_policy("length_aware", 5)
    for key, depth in [(1, 0), (2, 1), (3, 2), (4, 0), (5, 7)]:
        policy.insert(key, depth)
    policy.hit(5)
    assert [policy.evict() for _ in range(5)] == [3, 2, 1, 4, 5]


def test_cost_aware_by_hand() -> None:
    """With blocks as long as attention takes to weigh one, the cost of a block is 1 + depth."""
    policy = make_policy("cost_aware", 3, EQUAL_COST_TOKENS)
    for key, depth in [(1, 0), (2, 2), (3, 1)]:
        policy.insert(key, depth)  # ranks 1, 3 and 2
    victims = []
    for key in (4, 5, 6, 7):  # the age becomes 1, 2, 2 and 3; ranks 2, 3, 3 and 4
        victims.append(policy.evict(key))
        policy.insert(key, 0)
    policy.hit(5)  # 3 + 2 uses
    victims += [policy.evict() for _ in range(3)]
    assert victims == [1, 3, 4, 2, 6, 7, 5]


def test_arc_learns_no_more_than_its_capacity() -> None:
    policy = make_policy("arc", 2)
    serve(policy, "aabcabcbacbdbacbadbc" * 20, 2)
    assert 0 <= policy.target <= 2
    assert len(policy._b1) + len(policy._t1) <= 2
    assert len(policy._b1) + len(policy._b2) <= 4


def sieve_of_the_paper(uses: list[int], capacity: int) -> list[int]:
    """Algorithm 1 of the paper on a list from old to new; the hand is a key or None, the tail."""
    queue: list[int] = []
    visited: dict[int, bool] = {}
    hand, victims = None, []
    for key in uses:
        if key in visited:
            visited[key] = True
            continue
        if len(queue) == capacity:
            at = 0 if hand is None else queue.index(hand)
            while visited[queue[at]]:
                visited[queue[at]] = False
                at = (at + 1) % capacity
            hand = queue[at + 1] if at + 1 < capacity else None
            victims.append(queue.pop(at))
            del visited[victims[-1]]
        queue.append(key)
        visited[key] = False
    return victims


def lru_of_a_list(uses: list[int], capacity: int) -> list[int]:
    queue: list[int] = []
    victims = []
    for key in uses:
        if key in queue:
            queue.remove(key)
        elif len(queue) == capacity:
            victims.append(queue.pop(0))
        queue.append(key)
    return victims


def clock_of_a_ring(uses: list[int], capacity: int) -> list[int]:
    ring: deque[list[int]] = deque()
    victims = []
    for key in uses:
        entry = next((entry for entry in ring if entry[0] == key), None)
        if entry:
            entry[1] = 1
            continue
        if len(ring) == capacity:
            while ring[0][1]:
                ring[0][1] = 0
                ring.rotate(-1)
            victims.append(ring.popleft()[0])
        ring.append([key, 0])
    return victims


def lfu_of_a_scan(uses: list[int], capacity: int) -> list[int]:
    counts: dict[int, tuple[int, int]] = {}
    victims = []
    for time, key in enumerate(uses):
        if key not in counts and len(counts) == capacity:
            victims.append(min(counts, key=counts.__getitem__))
            del counts[victims[-1]]
        counts[key] = (counts.get(key, (0, 0))[0] + 1, time)
    return victims


@pytest.mark.parametrize(
    ("name", "scan"),
    [
        ("sieve", sieve_of_the_paper),
        ("lru", lru_of_a_list),
        ("clock", clock_of_a_ring),
        ("lfu", lfu_of_a_scan),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@settings(max_examples=200, deadline=None)
@given(uses=st.lists(st.integers(0, 11), max_size=120), capacity=st.integers(1, 8))
def test_follows_the_algorithm_written_as_a_scan(
    name: str, scan: object, uses: list[int], capacity: int
) -> None:
    letters = "".join(chr(97 + use) for use in uses)
    victims = serve(make_policy(name, capacity), letters, capacity)
    assert victims == "".join(chr(97 + victim) for victim in scan(uses, capacity))


def test_the_sketch_counts_forgets_and_saturates() -> None:
    sketch = FrequencySketch(1000)
    for _ in range(100):
        sketch.record(7)
    assert sketch.estimate(7) == MAX_COUNT
    for key in range(1000, 2000):
        sketch.record(key)
        sketch.record(key)
    estimates = [sketch.estimate(key) for key in range(1000, 2000)]
    assert min(estimates) >= 2
    assert sum(estimate > 2 for estimate in estimates) < 50
    for key in range(20_000, 28_000):
        sketch.record(key)
    assert sketch.estimate(7) < MAX_COUNT, "ten uses a block of capacity halve the counts"


def test_belady_needs_a_future() -> None:
    with pytest.raises(ValueError, match="'belady' needs the future of the trace"):
        make_policy("belady", 4)


def test_every_policy_says_where_it_comes_from() -> None:
    """A paper, in the docstring of its file, with the year; FIFO needs none."""
    for policy in POLICIES.values():
        module = __import__(policy.__module__, fromlist=["__doc__"])
        assert policy.name == "fifo" or any(c in module.__doc__ for c in ("19", "20")), policy


# -- what every policy must hold, as a set of evictable blocks


class Blocks:
    """A pool of blocks in states, driven through an evictor as an allocator drives it."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 2)
        future = Future([[i % 7, i % 5] for i in range(40)])
        self.evictor: Evictor = make_evictor(name, self.pool, future)
        self.future = future
        self.free = list(range(num_blocks))
        self.in_use: dict[int, int] = {}  # block to content
        self.evictable: dict[int, int] = {}
        self.victims: list[int] = []

    def cache(self, contents: list[int], depth: int) -> None:
        """New contents, a chain, into free blocks."""
        known = {*self.in_use.values(), *self.evictable.values()}
        contents = [c for c in dict.fromkeys(contents) if c not in known][: len(self.free)]
        ids = [self.free.pop() for _ in contents]
        self.pool.content_hash[ids] = contents
        self.pool.depth[ids] = np.arange(depth, depth + len(ids))
        self.in_use.update(zip(ids, contents, strict=True))
        self.evictor.on_cached(int32(ids))

    def hit(self, numbers: list[int]) -> None:
        ids = self.pick({**self.in_use, **self.evictable}, numbers)
        revived = [i for i in ids if i in self.evictable]
        self.evictor.remove(int32(revived))
        self.evictor.on_hit(int32(ids))
        for i in revived:
            self.in_use[i] = self.evictable.pop(i)

    def release(self, numbers: list[int], now: int) -> None:
        ids = self.pick(self.in_use, numbers)
        self.pool.last_accessed[ids] = now
        self.future.now = now
        self.evictor.add(int32(ids))
        for i in ids:
            self.evictable[i] = self.in_use.pop(i)

    def drop(self, numbers: list[int]) -> None:
        ids = self.pick(self.in_use, numbers)
        self.evictor.on_dropped(int32(ids))
        for i in ids:
            del self.in_use[i]
        self.free += ids

    def wait_uncached(self, count: int) -> None:
        """Free blocks that are to be evicted in their turn."""
        ids = [self.free.pop() for _ in range(min(count, len(self.free)))]
        self.evictor.on_uncached(int32(ids))
        self.evictor.add(int32(ids))
        self.evictable.update(dict.fromkeys(ids, -1))

    def evict(self, count: int, incoming: list[int]) -> None:
        count = min(count, len(self.evictable))
        victims = self.evictor.evict(count, np.array(incoming[:count], dtype=np.int64)).tolist()
        assert len(victims) == count == len(set(victims))
        for victim in victims:
            assert victim in self.evictable, "a block in use, or none at all, was evicted"
            del self.evictable[victim]
        self.free += victims
        self.victims += victims

    def pick(self, states: dict[int, int], numbers: list[int]) -> list[int]:
        ids = sorted(i for i, content in states.items() if content >= 0)
        return list(dict.fromkeys(ids[n % len(ids)] for n in numbers)) if ids else []

    def check(self) -> None:
        assert len(self.evictor) == len(self.evictable)
        assert self.evictor.block_ids().tolist() == sorted(self.evictable)


NUMBERS = st.lists(st.integers(0, 29), max_size=6)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["cache", "cache", "release", "release", "evict", "hit", "drop", "wait"]),
        NUMBERS,
        st.integers(0, 9),
    ),
    max_size=60,
)


def run_steps(name: str, steps: list) -> Blocks:
    blocks = Blocks(name, 12)
    for now, (kind, numbers, number) in enumerate(steps):
        match kind:
            case "cache":
                blocks.cache(numbers, number)
            case "release":
                blocks.release(numbers, now)
            case "evict":
                blocks.evict(number, numbers)
            case "hit":
                blocks.hit(numbers)
            case "drop":
                blocks.drop(numbers)
            case "wait":
                blocks.wait_uncached(number % 3)
        blocks.check()
    blocks.evict(12, [])
    blocks.check()
    assert len(blocks.in_use) + len(blocks.free) == 12
    return blocks


@every_policy
@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_no_block_in_use_is_evicted_and_none_is_lost_or_doubled(name: str, steps: list) -> None:
    first = run_steps(name, steps)
    assert run_steps(name, steps).victims == first.victims, "a policy is not deterministic"


def num_entries(value: object, seen: set[int] | None = None) -> int:
    """Elements of all dicts, lists and sets below an object."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (Future, BlockPool, str, bytes, np.ndarray)):
        return 0
    seen.add(id(value))
    count = len(value) if isinstance(value, Sized) and not isinstance(value, bytearray) else 0
    inner = list(value.values()) if isinstance(value, dict) else []
    inner += value if isinstance(value, (list, tuple)) else []
    inner += vars(value).values() if hasattr(value, "__dict__") else []
    return count + sum(num_entries(item, seen) for item in inner)


@every_policy
def test_memory_is_bounded(name: str) -> None:
    """Long churn, most contents seen once, some again and again, blocks pinned all the while."""
    rng = np.random.default_rng(0)
    blocks = Blocks(name, 200)
    blocks.cache(list(range(10**6, 10**6 + 40)), 0)
    sizes = []
    for step in range(800):
        blocks.cache([*rng.zipf(1.3, 8).tolist(), 2000 + step], int(rng.integers(20)))
        blocks.hit(rng.integers(0, 200, 5).tolist())
        blocks.release(rng.integers(0, 200, 12).tolist(), step)
        if len(blocks.free) < 20:
            blocks.evict(20, [2001 + step])
        sizes.append(num_entries(blocks.evictor))
    # Per block: its key and id, a place, a count, a depth; and ghosts of twice the capacity.
    assert max(sizes) <= 16 * 200 + 1200, max(sizes)
    assert max(sizes[400:]) <= 1.3 * max(sizes[:400])


@every_policy
def test_clear_forgets_everything(name: str) -> None:
    victims = []
    blocks = Blocks(name, 12)
    for _ in range(2):
        blocks.future.now = -1
        blocks.cache([1, 2, 3, 4], 0)
        blocks.cache([5, 6], 2)
        blocks.hit([1, 4])
        blocks.release(list(range(12)), 1)
        blocks.evict(3, [8, 9])
        victims.append(blocks.victims)
        blocks.evictor.clear()
        assert len(blocks.evictor) == 0
        assert blocks.evictor.block_ids().tolist() == []
        evictor, pool, future = blocks.evictor, blocks.pool, blocks.future
        blocks = Blocks(name, 12)
        blocks.evictor, blocks.pool, blocks.future = evictor, pool, future
    assert victims[0] == victims[1]


# -- inside the block manager


@every_policy
@pytest.mark.parametrize("reuse_uncached_first", [True, False], ids=["uncached-first", "in-order"])
def test_serves_in_a_block_manager(name: str, reuse_uncached_first: bool) -> None:
    """Prompts that share prefixes, forks, swaps and appends in a pool so small that it evicts."""
    rng = np.random.default_rng(1)
    future = Future([])

    def evictor(pool: BlockPool) -> Evictor:
        return make_evictor(name, pool, future)

    manager = BlockSpaceManager(
        2, 24, 8, 0.0, None, True, evictor=evictor, reuse_uncached_first=reuse_uncached_first
    )
    running: list[SequenceGroup] = []
    num_hits = 0
    for step in range(300):
        prompt = np.concatenate(
            [np.full(2 * int(rng.integers(1, 5)), rng.integers(3)), rng.integers(0, 3, 3)]
        )
        seq = Sequence(2 * step, prompt.astype(np.int32))
        group = SequenceGroup(step, [seq])
        while manager.can_allocate(group) is not AllocStatus.OK:
            manager.free_many(running.pop(0).seqs)
        num_hits += manager.get_num_cached_tokens(seq)
        manager.allocate(group)
        seq.status = SequenceStatus.RUNNING
        running.append(group)
        if step % 7:
            manager.mark_blocks_as_computed(group)
        if step % 5 == 0 and manager.can_swap_out(group):
            manager.swap_out(group)
            if manager.can_swap_in(group) is AllocStatus.OK:
                manager.swap_in(group)
            else:
                manager.free(seq)
                running.remove(group)
        elif step % 3 == 0:
            child = seq.fork(2 * step + 1)
            manager.fork(seq, child)
            group.add(child)
            for each in group.seqs:
                each.append_token_ids(rng.integers(0, 2, 3).tolist())
                if manager.can_append_slots(group):
                    manager.append_slots(each)
        manager.check_integrity()
    assert num_hits > 100
    assert manager.get_stats().evictions > 50
