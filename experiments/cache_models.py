"""What a cache of a given size and policy hits on a trace.

Two models. `flat`: each block is an object of its own, looked up in order, as general cache
simulators do. `blocks`: what an allocator does. A hit is the longest run of full cached blocks from
the start, the last token is always computed, and all blocks of a request are held while it runs
and freed together.

`blocks` runs on a `TokenPool`, the real `PrefixCachingBlockAllocator` with real tokens and hashes,
or on a `KeyPool`, the same rules on plain dicts, which needs the keys alone. Both hit the same.
"""

import heapq
import itertools
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from cache.content_hash import ContentHasher
from cache.evictor import EvictorChoice, Future, Policy
from cache.prefix_caching import PrefixCachingBlockAllocator

from .references import References


@dataclass
class Outcome:
    """What a replay did, request by request and in total."""

    hit_blocks: np.ndarray
    """int64 [num_requests]: cached blocks that need not be computed."""
    hit_tokens: np.ndarray
    """int64 [num_requests]: tokens in these."""
    late_blocks: np.ndarray
    """int64 [num_requests]: cached blocks behind the first missing one; a hit in `flat` alone."""
    num_insertions: int = 0
    """Blocks that entered the cache."""
    num_reused: int = 0
    """Of these, blocks that were found again while they were cached."""
    num_evictions: int = 0
    num_refused: int = 0
    """Requests of more blocks than the cache has; they hit nothing."""


def _nothing() -> None:
    pass


def replay_flat(
    references: References,
    policy: Policy,
    future: Future | None = None,
    on_request: Callable[[], object] = _nothing,
) -> Outcome:
    """Look up every block on its own, partly filled ones too.

    `future`, where the policy has one, has a time for each reference. `on_request` is called after
    each request.
    """
    capacity = policy.capacity
    evict, insert, hit = policy.evict, policy.insert, policy.hit
    cached: set[int] = set()
    unhit: set[int] = set()
    keys, starts = references.content_keys.tolist(), references.starts.tolist()
    was_hit = bytearray(len(keys))
    num_evictions = num_reused = 0
    i = 0
    for start, end in itertools.pairwise(starts):
        for i in range(start, end):
            key = keys[i]
            if future is not None:
                future.now = i
            if key in cached:
                was_hit[i] = 1
                hit(key)
                if key in unhit:
                    unhit.remove(key)
                    num_reused += 1
                continue
            if len(cached) >= capacity:
                victim = evict(key)
                cached.remove(victim)
                unhit.discard(victim)
                num_evictions += 1
            cached.add(key)
            unhit.add(key)
            insert(key, i - start)
        on_request()
    hits = np.frombuffer(was_hit, dtype=np.uint8).astype(np.int64)
    first = references.starts[:-1]
    # Within a request, the product of the flags so far says whether all before were hits.
    misses = np.cumsum(1 - hits)
    misses -= np.repeat(misses[first] - (1 - hits[first]), references.num_blocks)
    return Outcome(
        hit_blocks=np.add.reduceat(hits, first),
        hit_tokens=np.add.reduceat(hits * references.block_tokens, first),
        late_blocks=np.add.reduceat(hits * (misses > 0), first),
        num_insertions=len(keys) - int(hits.sum()),
        num_reused=num_reused,
        num_evictions=num_evictions,
    )


class Found(NamedTuple):
    """What a request found cached when it was given its blocks."""

    run: int
    """Full blocks from the start that are cached and computed."""
    late: int
    """Cached blocks behind."""


class Pool(Protocol):
    """Blocks for requests, which are known by their index."""

    num_insertions: int
    num_reused: int
    num_evictions: int

    def start(self, index: int) -> Found | None:
        """Give a request its blocks; None, with nothing changed, where there are too few."""
        ...

    def mark_computed(self, index: int) -> None:
        """The prompt of a request that runs is computed."""
        ...

    def finish(self, index: int) -> None:
        """Take the blocks of a request back, the last one first."""
        ...


def replay_blocks(
    references: References,
    pool: Pool,
    capacity: int,
    seconds: Callable[[int, int], tuple[float, float]] | None = None,
    future: Future | None = None,
    on_request: Callable[[], object] = _nothing,
) -> Outcome:
    """Serve one request after the other, or, given `seconds`, let them overlap.

    Args:
        capacity: blocks of the pool.
        seconds: given the index of a request and its hit tokens, how long its prompt takes to
            compute and how long it holds its blocks. It starts at its arrival, or when enough
            blocks are free; later requests wait behind it.
        future: has a time for each request.
        on_request: called after each request.
    """
    num_requests = len(references.requests)
    hits, late = np.zeros((2, num_requests), dtype=np.int64)
    skippable = references.num_skippable_blocks.tolist()
    events: list[tuple[float, int, bool]] = []  # time, request, whether it finishes
    now = 0.0
    num_refused = 0

    def next_event() -> float:
        time, index, finishes = heapq.heappop(events)
        (pool.finish if finishes else pool.mark_computed)(index)
        return time

    for index, num_blocks in enumerate(references.num_blocks.tolist()):
        on_request()
        if num_blocks > capacity:
            num_refused += 1
            continue
        if future is not None:
            future.now = index
        if seconds is not None:
            now = max(now, references.requests[index].arrival_s)
            while events and events[0][0] <= now:
                next_event()
        while (found := pool.start(index)) is None:
            now = next_event()
        hits[index] = min(found.run, skippable[index])
        late[index] = found.late
        if seconds is None:
            pool.mark_computed(index)
            pool.finish(index)
        else:
            computed, finished = seconds(index, int(hits[index]) * references.block_size)
            heapq.heappush(events, (now + computed, index, False))
            heapq.heappush(events, (now + finished, index, True))
    return Outcome(
        hits,
        hits * references.block_size,
        late,
        pool.num_insertions,
        pool.num_reused,
        pool.num_evictions,
        num_refused,
    )


class KeyPool:
    """The rules of `PrefixCachingBlockAllocator` on prefix keys, with counts in place of ids."""

    def __init__(
        self, references: References, policy: Policy, reuse_uncached_first: bool = True
    ) -> None:
        self.num_insertions = self.num_reused = self.num_evictions = 0
        self._policy = policy
        self._reuse_uncached_first = reuse_uncached_first
        self._num_free = policy.capacity
        self._num_evictable = 0
        keys, starts = references.prefix_keys.tolist(), references.starts.tolist()
        full = references.num_full_blocks.tolist()
        self._keys = [keys[s : s + n] for s, n in zip(starts, full, strict=False)]
        self._num_partial = (references.num_blocks - references.num_full_blocks).tolist()
        self._is_computed: dict[int, bool] = {}  # for every cached key
        self._num_references: dict[int, int] = {}  # for those in use
        self._unhit: set[int] = set()
        self._next_uncached = -(1 << 64)  # a key that no content has

    def start(self, index: int) -> Found | None:
        keys, cached = self._keys[index], self._is_computed
        hits = [key for key in keys if key in cached]
        revived = [key for key in hits if key not in self._num_references]
        num_new = len(keys) - len(hits) + self._num_partial[index]
        if num_new + len(revived) > self._num_free + self._num_evictable:
            return None
        run = 0
        while run < len(hits) and hits[run] == keys[run] and cached[hits[run]]:
            run += 1
        depths = range(len(hits), len(keys))
        if run < len(hits):
            depths = [depth for depth, key in enumerate(keys) if key not in cached]
        misses = [keys[depth] for depth in depths]
        if hits:
            self._hit(hits, revived)
        self._make_room(num_new, misses)
        if misses:
            self._insert(misses, depths)
        return Found(run, len(hits) - run)

    def _hit(self, hits: list[int], revived: list[int]) -> None:
        self._policy.pin(revived)
        self._num_evictable -= len(revived)
        hit, references = self._policy.hit, self._num_references
        for key in reversed(hits):
            hit(key)
            references[key] = references.get(key, 0) + 1
        num_unhit = len(self._unhit)
        self._unhit.difference_update(hits)
        self.num_reused += num_unhit - len(self._unhit)

    def _make_room(self, count: int, incoming: list[int]) -> None:
        """Take `count` blocks, the free ones first."""
        for i in range(self._num_free, count):
            victim = self._policy.evict(incoming[i] if i < len(incoming) else None)
            self._num_evictable -= 1
            if self._is_computed.pop(victim, None) is not None:
                self._unhit.discard(victim)
                self.num_evictions += 1
        self._num_free = max(0, self._num_free - count)

    def _insert(self, keys: list[int], depths: ListOf[int]) -> None:
        insert = self._policy.insert
        for key, depth in zip(reversed(keys), reversed(depths), strict=True):
            insert(key, depth)
        self._policy.pin(keys)
        self._is_computed.update(dict.fromkeys(keys, False))
        self._num_references.update(dict.fromkeys(keys, 1))
        self._unhit.update(keys)
        self.num_insertions += len(keys)

    def mark_computed(self, index: int) -> None:
        self._is_computed.update(dict.fromkeys(self._keys[index], True))

    def finish(self, index: int) -> None:
        if self._num_partial[index]:
            if self._reuse_uncached_first:
                self._num_free += 1
            else:
                self._policy.insert(self._next_uncached, len(self._keys[index]))
                self._next_uncached -= 1
                self._num_evictable += 1
        references = self._num_references
        released = []
        for key in reversed(self._keys[index]):
            remaining = references.pop(key) - 1
            if remaining:
                references[key] = remaining
            else:
                released.append(key)
        self._policy.unpin(released)
        self._num_evictable += len(released)


class TokenPool:
    """A `PrefixCachingBlockAllocator` that is given the tokens of each prompt."""

    def __init__(
        self,
        references: References,
        capacity: int,
        evictor: EvictorChoice,
        hasher: ContentHasher,
        reuse_uncached_first: bool = True,
    ) -> None:
        self.num_insertions = self.num_reused = 0
        self.allocator = PrefixCachingBlockAllocator(
            capacity,
            references.block_size,
            evictor=evictor,
            hasher=hasher,
            reuse_uncached_first=reuse_uncached_first,
        )
        self._requests = references.requests
        self._was_hit = np.zeros(capacity, dtype=bool)
        self._block_ids: dict[int, np.ndarray] = {}
        self._num_finished = 0

    @property
    def num_evictions(self) -> int:
        return self.allocator.stats.evictions

    def start(self, index: int) -> Found | None:
        request, allocator = self._requests[index], self.allocator
        tokens = request.prompt_token_ids()
        plan = allocator.plan(tokens, len(tokens), allocator.hasher.root(request.extra_key))
        if plan.num_taken > allocator.num_free:
            return None
        is_hit = plan.found >= 0
        hits = plan.found[is_hit]
        is_hit[is_hit] = allocator.pool.computed[hits]
        run = len(is_hit) if is_hit.all() else int(is_hit.argmin())
        block_ids = self._block_ids[index] = allocator.allocate_sequence(tokens, plan)
        self.num_reused += len(hits) - int(np.count_nonzero(self._was_hit[hits]))
        self._was_hit[block_ids] = False
        self._was_hit[hits] = True
        self.num_insertions += len(is_hit) - len(hits)
        return Found(run, len(hits) - run)

    def mark_computed(self, index: int) -> None:
        self.allocator.mark_computed(self._block_ids[index])

    def finish(self, index: int) -> None:
        block_ids = self._block_ids.pop(index)
        self._num_finished += 1
        self.allocator.pool.last_accessed[block_ids] = self._num_finished
        self.allocator.release(block_ids[::-1], distinct=True)
