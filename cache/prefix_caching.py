"""Block allocation with prefix caching.

A full block is registered in the PrefixIndex under its content hash; there is at most one block for
each content. It can be skipped by another sequence once it is computed. Without references it
stays, evictable, until the evictor chooses it.

A hit is a block whose hash and whose tokens equal the request's. That the blocks before it agree
too is what the chained hash says, and what a lookup from the start checks block by block.
"""

from collections.abc import Sequence as ListOf

import numpy as np

from .block_pool import NO_BLOCK, BlockPool
from .content_hash import ContentHasher
from .evictor import EvictorChoice, make_evictor
from .interfaces import Block, Device, as_token_ids
from .naive import NaiveBlock, NaiveBlockAllocator, Occupancy, SequencePlan
from .prefix_index import PrefixIndex

# In an array of found block ids: no entry, or an entry that cannot serve (another content with the
# same hash, or one not computed yet). The content of the second kind cannot be registered.
ABSENT, UNUSABLE = -1, -2


class PrefixCachingBlock(NaiveBlock):
    """A block of a `PrefixCachingBlockAllocator`."""

    __slots__ = ()

    @property
    def content_hash(self) -> int | None:
        return int(self._allocator.pool.content_hash[self._live_id()]) if self.is_full else None


class PrefixCachingBlockAllocator(NaiveBlockAllocator):
    """Allocates the blocks of one device and shares full blocks with equal prefixes.

    Args:
        num_blocks, block_size, device: as in `NaiveBlockAllocator`.
        evictor: the name of a policy, or what makes an evictor for a pool.
        hasher: for this block size; by default mix64 with a random seed. Allocators that swap with
            each other share one.
        track_index_changes: keep what `index.drain_changes` returns, for a copy on a GPU.
        reuse_uncached_first: hand out freed blocks without cached content before any eviction.
            Otherwise they take their place in the order of eviction, as in vLLM V1's free queue,
            and cached blocks that are older go first.

    Raises:
        ValueError: for a count out of range, an unknown evictor or a hasher of another block size.
    """

    block_type = PrefixCachingBlock

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        device: Device = Device.GPU,
        evictor: EvictorChoice = "lru",
        hasher: ContentHasher | None = None,
        track_index_changes: bool = False,
        reuse_uncached_first: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, device)
        self.hasher = hasher or ContentHasher(self.block_size)
        if self.hasher.block_size != self.block_size:
            raise ValueError(
                f"hasher has block size {self.hasher.block_size}; expected {self.block_size}"
            )
        self.index = PrefixIndex(num_blocks, track_index_changes)
        self.evictor = make_evictor(evictor, self.pool)
        self.reuse_uncached_first = reuse_uncached_first

    # -- one block at a time

    def allocate_immutable(
        self,
        prev_block: Block | None,
        token_ids: ListOf[int] | np.ndarray,
        device: Device | None = None,
        extra_key: object = None,
    ) -> Block:
        self._check_device(device)
        tokens = self._full_block_tokens(token_ids).reshape(1, -1)
        self.check_previous(prev_block, must_be_full=True)
        parent, position = self._hash_before(prev_block, extra_key)
        hashes = self.hasher.hash_next(parent, position, tokens)
        found = self._lookup(hashes, tokens)
        if found[0] >= 0:
            self.stats.lookups += 1
            self.stats.hits += 1
            self._reference_cached(found)
            return self.block_type(self, found[0], prev_block, extra_key)
        block_id = self._take_full(prev_block, tokens)
        self.stats.lookups += 1
        self.pool.in_prefill[block_id] = True
        self._register(block_id, hashes, parent, found)
        return self.block_type(self, block_id[0], prev_block, extra_key)

    def _hash_before(
        self, prev_block: Block | None, extra_key: object
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what `hash_next` needs of a block's predecessor."""
        if prev_block is None:
            return self.hasher.root(extra_key).reshape(1), np.zeros(1, dtype=np.int64)
        previous = prev_block._live_id()
        return (
            self.pool.content_hash[previous : previous + 1],
            self.pool.depth[previous : previous + 1].astype(np.int64) + 1,
        )

    def _parent_hash(self, block: NaiveBlock) -> np.ndarray:
        return self._hash_before(block.prev_block, block._extra_key)[0]

    # -- whole sequences

    def plan(
        self,
        tokens: np.ndarray,
        num_slots: int,
        root: np.int64 | None = None,
        hashes: np.ndarray | None = None,
    ) -> SequencePlan:
        num_full = len(tokens) // self.block_size
        blocks = tokens[: num_full * self.block_size].reshape(num_full, self.block_size)
        root = self.hasher.root() if root is None else root
        if hashes is None:
            hashes = self.hasher.hash_chain(blocks, root)
        found = self._lookup(hashes, blocks)
        is_hit = found >= 0
        run = _run_length(is_hit)
        num_hits = int(np.count_nonzero(is_hit))
        num_revived = num_computed = 0
        if num_hits:
            hits = found[:run] if num_hits == run else found[is_hit]
            num_revived = num_hits - int(np.count_nonzero(self.pool.ref_count.take(hits)))
            skippable = min(run, (len(tokens) - 1) // self.block_size)
            num_computed = _run_length(self.pool.computed.take(found[:skippable]))
        num_new = self.num_blocks_for(num_slots) - num_hits
        return SequencePlan(
            root, hashes, found, run, num_hits - run, num_new, num_revived, num_computed
        )

    def allocate_sequence(self, tokens: np.ndarray, plan: SequencePlan) -> np.ndarray:
        self._require(plan.num_taken)
        num_full = len(plan.found)
        self.stats.lookups += num_full
        run = plan.num_prefix_hits
        self.stats.hits += run + plan.num_late_hits
        # Hits are referenced before anything is evicted, so that no request evicts its own prefix.
        if plan.num_late_hits:
            is_hit = plan.found >= 0
            self._reference_cached(plan.found[is_hit])
            new_ids = self._take(plan.num_new, plan.hashes[~is_hit])
            return self._allocate_around_late_hits(tokens, plan, new_ids)
        prefix, rest = plan.found[:run], plan.found[run:]
        self._reference_cached(prefix)
        new_ids = self._take(plan.num_new, plan.hashes[run:])
        previous = int(prefix[-1]) if run else NO_BLOCK
        self._write_new(new_ids, tokens[run * self.block_size :], run, previous)
        parents = _parents(plan.root, plan.hashes, run)
        self.pool.in_prefill[new_ids[: num_full - run]] = True
        self._register(new_ids[: num_full - run], plan.hashes[run:], parents, rest)
        return np.concatenate([prefix, new_ids]) if run else new_ids

    def _allocate_around_late_hits(
        self, tokens: np.ndarray, plan: SequencePlan, new_ids: np.ndarray
    ) -> np.ndarray:
        """As `allocate_sequence`, where cached blocks follow one that was evicted."""
        num_full = len(plan.found)
        missing = np.flatnonzero(plan.found < 0)
        block_ids = np.concatenate([plan.found, new_ids[len(missing) :]])
        block_ids[missing] = new_ids[: len(missing)]
        fresh = np.concatenate([missing, np.arange(num_full, len(block_ids))])
        self._reset_columns(block_ids[fresh])
        pool = self.pool
        pool.num_tokens[new_ids] = 0
        pool.num_tokens[block_ids[missing]] = self.block_size
        pool.depth[block_ids[fresh]] = fresh
        previous = np.concatenate([[NO_BLOCK], block_ids[:-1]])
        ours = pool.ref_count[block_ids] == 1
        pool.prev_block[block_ids[ours]] = previous[ours]
        blocks = tokens[: num_full * self.block_size].reshape(num_full, self.block_size)
        pool.token_ids[block_ids[missing]] = blocks[missing]
        rest = len(tokens) - num_full * self.block_size
        if rest:
            pool.token_ids[block_ids[num_full], :rest] = tokens[-rest:]
            pool.num_tokens[block_ids[num_full]] = rest
        pool.in_prefill[block_ids[missing]] = True
        parents = _parents(plan.root, plan.hashes, 0)[missing]
        self._register(block_ids[missing], plan.hashes[missing], parents, plan.found[missing])
        return block_ids

    # -- arrays of blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free + len(self.evictor)

    def _take(self, count: int, hashes: np.ndarray | None = None) -> np.ndarray:
        """As in `NaiveBlockAllocator`; `hashes` are those that the first blocks will hold."""
        self._require(count)
        num_free = self.pool.num_free
        if count <= num_free:
            return self.pool.take(count)
        incoming = None if hashes is None else hashes[num_free:]
        victims = self.evictor.evict(count - num_free, incoming)
        evicted = victims
        if not self.reuse_uncached_first:
            evicted = victims[self.pool.cached[victims]]
        self._unregister(evicted)
        self.stats.evictions += len(evicted)
        return np.concatenate([self.pool.take(num_free), victims]) if num_free else victims

    def _lookup(self, hashes: np.ndarray, token_blocks: np.ndarray) -> np.ndarray:
        """Return the block cached with each hash and tokens, int32 [n], or ABSENT or UNUSABLE."""
        found = self.index.lookup(hashes)
        is_hit = found >= 0
        num_hits = np.count_nonzero(is_hit)
        if not num_hits:
            return found
        hit_ids = found
        if num_hits < len(found):
            # Most often the hits are a prefix, and a slice is cheaper than a selection.
            hits = slice(num_hits) if _run_length(is_hit) == num_hits else is_hit
            token_blocks, hit_ids = token_blocks[hits], found[hits]
        stored = self.pool.token_ids.take(hit_ids, axis=0)
        if stored.tobytes() != token_blocks.tobytes():
            hits = np.flatnonzero(is_hit)
            found[hits[(stored != token_blocks).any(axis=1)]] = UNUSABLE
        return found

    def _reference_cached(self, block_ids: np.ndarray) -> None:
        """Add a reference to cached blocks, taking them off the evictor where they were on it."""
        if not len(block_ids):
            return
        references = self.pool.ref_count.take(block_ids)
        if np.count_nonzero(references) < len(references):
            self.evictor.remove(block_ids[references == 0])
        self.evictor.on_hit(block_ids)
        self.pool.ref_count[block_ids] = references + 1

    def _register(
        self, block_ids: np.ndarray, hashes: np.ndarray, parents: np.ndarray, found: np.ndarray
    ) -> None:
        """Enter full blocks in use into the cache, those that `_lookup` found ABSENT.

        The others keep their content for themselves. `parents` are the hashes before each.
        """
        if not len(block_ids):
            return
        self.pool.content_hash[block_ids] = hashes
        self.pool.parent_hash[block_ids] = parents
        absent = found == ABSENT
        if np.count_nonzero(absent) < len(absent):
            block_ids, hashes = block_ids[absent], hashes[absent]
        self.index.insert(hashes, block_ids)
        self.pool.cached[block_ids] = True
        self.evictor.on_cached(block_ids)

    def _unregister(self, block_ids: np.ndarray) -> None:
        self.index.remove(self.pool.content_hash[block_ids])
        self.pool.cached[block_ids] = False

    def fill(self, block_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        pool = self.pool
        tokens = pool.token_ids[block_ids]
        hashes = self.hasher.hash_next(parents, pool.depth[block_ids], tokens)
        found = self._lookup(hashes, tokens)
        misses = np.flatnonzero(found < 0)
        if len(misses):
            # Of blocks that fill with one content together, the first is registered.
            first = _first_occurrences(hashes[misses])
            later = np.delete(misses, first) if len(first) < len(misses) else misses[:0]
            misses = misses[first]
            self._register(block_ids[misses], hashes[misses], parents[misses], found[misses])
            if len(later):
                found[later] = self._lookup(hashes[later], tokens[later])
                pool.content_hash[block_ids[later]] = hashes[later]
                pool.parent_hash[block_ids[later]] = parents[later]
        promoted = np.flatnonzero(found >= 0)
        return self._promote(block_ids, found, promoted) if len(promoted) else block_ids

    def _promote(
        self, block_ids: np.ndarray, cached_ids: np.ndarray, promoted: np.ndarray
    ) -> np.ndarray:
        """Exchange private blocks for the cached ones with their content; returns all ids.

        A cached block whose prompt is still being computed gets the KV by a copy, since the
        sequence reads it in the next step already.
        """
        cached_ids = cached_ids[promoted]
        unwritten = self.pool.in_prefill[cached_ids]
        if unwritten.any():
            self.copy_on_writes.record(block_ids[promoted][unwritten], cached_ids[unwritten])
        unique = np.unique(cached_ids)
        self.evictor.remove(unique[self.pool.ref_count[unique] == 0])
        self.evictor.on_hit(unique)
        np.add.at(self.pool.ref_count, cached_ids, 1)
        self.stats.promotions += len(promoted)
        self.release(block_ids[promoted], distinct=True)
        result = block_ids.copy()
        result[promoted] = cached_ids
        return result

    def _on_unreferenced(self, block_ids: np.ndarray) -> None:
        cached = self.pool.cached[block_ids]
        # Cached but never computed: the KV was not written, so there is nothing to keep.
        kept = cached & self.pool.computed[block_ids]
        num_kept = np.count_nonzero(kept)
        if num_kept < np.count_nonzero(cached):
            dropped = block_ids[cached & ~kept]
            self.evictor.on_dropped(dropped)
            self._unregister(dropped)
        if num_kept < len(kept) and not self.reuse_uncached_first:
            self.evictor.on_uncached(block_ids[~kept])
            num_kept = len(kept)
        if num_kept == len(kept):
            self.evictor.add(block_ids)
            return
        if num_kept:
            self.evictor.add(block_ids[kept])
            block_ids = block_ids[~kept]
        self.pool.give_back(block_ids)

    # -- swapping: this allocator is the destination

    def plan_receive(self, source: NaiveBlockAllocator, block_ids: np.ndarray) -> int:
        found = self._find_content_of(source.pool, block_ids)
        hits = found[found >= 0]
        return len(block_ids) - len(hits) + len(self._revived(hits))

    def _revived(self, hits: np.ndarray) -> np.ndarray:
        """Those of the hits, which may repeat, that are evictable; distinct."""
        evictable = hits[self.pool.ref_count[hits] == 0]
        return np.unique(evictable) if len(evictable) else evictable

    def receive(
        self, source: NaiveBlockAllocator, block_ids: np.ndarray, references: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As in `NaiveBlockAllocator`; a block that is cached here already is not copied."""
        new_ids = self._find_content_of(source.pool, block_ids)
        hits = np.flatnonzero(new_ids >= 0)
        misses = np.flatnonzero(new_ids < 0)
        # Two of theirs may hold one content: one is cached, the other its owner's alone.
        revived = self._revived(new_ids[hits])
        self._require(len(misses) + len(revived))
        self.evictor.remove(revived)
        self.evictor.on_hit(np.unique(new_ids[hits]))
        np.add.at(self.pool.ref_count, new_ids[hits], references[hits])
        fresh = self._take(len(misses))
        found, new_ids[misses] = new_ids[misses], fresh
        theirs = block_ids[misses]
        self._copy_columns(source.pool, theirs, fresh)
        self.pool.ref_count[fresh] = references[misses]
        full = np.flatnonzero(source.pool.num_tokens[theirs] == self.block_size)
        hashes = source.pool.content_hash[theirs[full]]
        found = found[full]
        found[np.delete(np.arange(len(full)), _first_occurrences(hashes))] = UNUSABLE
        self._register(fresh[full], hashes, source.pool.parent_hash[theirs[full]], found)
        needs_copy = np.zeros(len(block_ids), dtype=bool)
        needs_copy[misses] = True
        return new_ids, needs_copy

    def _find_content_of(self, source: BlockPool, block_ids: np.ndarray) -> np.ndarray:
        """Return the computed block here that holds what each of theirs holds, as `_lookup`."""
        found = np.full(len(block_ids), ABSENT, dtype=np.int32)
        full = np.flatnonzero(source.num_tokens[block_ids] == self.block_size)
        if len(full):
            theirs = block_ids[full]
            hits = self._lookup(source.content_hash[theirs], source.token_ids[theirs])
            present = np.flatnonzero(hits >= 0)
            hits[present[~self.pool.computed[hits[present]]]] = UNUSABLE
            found[full] = hits
        return found

    # -- counts, marks, integrity

    def occupancy(self) -> Occupancy:
        counts = super().occupancy()
        if self.reuse_uncached_first:
            return counts
        num_cached = int(np.count_nonzero(self.pool.cached[self.evictor.block_ids()]))
        return Occupancy(counts.num_in_use, num_cached, self.num_free - num_cached)

    def mark_computed(self, block_ids: np.ndarray) -> None:
        full = block_ids[self.pool.num_tokens[block_ids] == self.block_size]
        self.pool.computed[full] = True
        self.pool.in_prefill[full] = False

    def get_common_computed_block_ids(self, lists: ListOf[ListOf[int]]) -> list[int]:
        if not lists:
            return []
        shortest = min(len(ids) for ids in lists)
        rows = np.array([np.asarray(ids)[:shortest] for ids in lists], dtype=np.int64)
        rows = rows.reshape(len(lists), shortest)
        common = (rows == rows[0]).all(axis=0) & self.pool.computed[rows[0]]
        length = shortest if common.all() else int(common.argmin())
        return rows[0, :length].tolist()

    def find_cached_prefix(
        self, token_ids: ListOf[int] | np.ndarray, extra_key: object = None
    ) -> np.ndarray:
        tokens = as_token_ids(token_ids)
        num_full = max(0, len(tokens) - 1) // self.block_size
        blocks = tokens[: num_full * self.block_size].reshape(num_full, self.block_size)
        hashes = self.hasher.hash_chain(blocks, self.hasher.root(extra_key))
        found = self._lookup(hashes, blocks)
        run = found[: _run_length(found >= 0)]
        return run[: _run_length(self.pool.computed.take(run))]

    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        if not super().reset_prefix_cache(device):
            return False
        self.index.clear()
        self.evictor.clear()
        self.pool.cached.fill(False)
        return True

    def check_integrity(self, references: np.ndarray | None = None) -> None:
        super().check_integrity(references)
        pool = self.pool
        hashes, block_ids = self.index.entries()
        assert len(hashes) == len(self.index), "the index has lost count"
        assert np.array_equal(np.sort(block_ids), np.flatnonzero(pool.cached)), (
            "the index and the cached flags disagree"
        )
        assert np.array_equal(self.index.lookup(hashes), block_ids), "an entry can't be found"
        assert np.array_equal(pool.content_hash[block_ids], hashes), "a hash is not its block's"
        assert (pool.num_tokens[block_ids] == self.block_size).all(), "a cached block is not full"
        evictable = self._evictable_ids()
        assert len(evictable) == len(self.evictor), "the evictor has lost count"
        if not self.reuse_uncached_first:
            evictable = evictable[pool.cached[evictable]]
        assert pool.cached[evictable].all(), "an evictable block is not cached"
        assert pool.computed[evictable].all(), "an evictable block was never computed"
        assert (pool.ref_count[pool.free_ids()] == 0).all()
        assert not pool.cached[pool.free_ids()].any(), "a free block is cached"
        expected = self.hasher.hash_next(
            pool.parent_hash[block_ids], pool.depth[block_ids], pool.token_ids[block_ids]
        )
        assert np.array_equal(expected, hashes), "a block does not hold what its hash says"

    def _evictable_ids(self) -> np.ndarray:
        return self.evictor.block_ids()


def _run_length(flags: np.ndarray) -> int:
    """Return how many leading flags are set."""
    return len(flags) if np.count_nonzero(flags) == len(flags) else int(flags.argmin())


def _first_occurrences(values: np.ndarray) -> np.ndarray:
    """Return the index of the first occurrence of each value, ascending."""
    ordered = np.sort(values)
    if not np.count_nonzero(ordered[1:] == ordered[:-1]):
        return np.arange(len(values))
    return np.sort(np.unique(values, return_index=True)[1])


def _parents(root: np.int64, hashes: np.ndarray, start: int) -> np.ndarray:
    """Return the hash before each block from `start` on, int64."""
    if start:
        return hashes[start - 1 : -1]
    parents = np.empty(len(hashes), dtype=np.int64)
    parents[:1] = root
    parents[1:] = hashes[:-1]
    return parents
