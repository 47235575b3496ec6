"""A trace as references to blocks: which content each block of each prompt is, and what repeats.

A Mooncake trace names the content of every 512 tokens by an id, so keys of blocks of any size that
divides 512, or is a multiple of it, follow from ids alone. Prompts of other workloads are hashed.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cache.content_hash import ContentHasher

from .ranges import ConfigError, InputError
from .requests import GOLDEN_GAMMA, MIX_1, Request, Workload, mix
from .traces import MOONCAKE_TOKENS_PER_ID, MooncakeTrace

MAX_REUSE_REFERENCES = 2_500_000


class Reuse(NamedTuple):
    """How far apart two references to one key are, for every reference that repeats a key."""

    distances: np.ndarray
    """int64: different keys referenced in between; an LRU cache of more blocks than that hits."""
    times_s: np.ndarray
    """float64: seconds between the arrivals of the two requests."""


@dataclass(frozen=True)
class References:
    """The blocks that the prompts of a workload refer to, request after request."""

    requests: list[Request]
    block_size: int
    num_tokens: np.ndarray
    """int64 [num_requests]."""
    starts: np.ndarray
    """int64 [num_requests + 1]: request i has the blocks starts[i] to starts[i + 1]."""
    content_keys: np.ndarray
    """int64 [num_blocks]: what a block holds, wherever it stands; the last may be partly filled."""
    prefix_keys: np.ndarray
    """int64 [num_blocks]: what a block and all blocks before it hold."""

    @cached_property
    def num_blocks(self) -> np.ndarray:
        """Blocks of each request, the last one possibly partly filled, int64 [num_requests]."""
        return np.diff(self.starts)

    @cached_property
    def num_full_blocks(self) -> np.ndarray:
        """Of these, full ones: only they can be shared, int64 [num_requests]."""
        return self.num_tokens // self.block_size

    @cached_property
    def num_skippable_blocks(self) -> np.ndarray:
        """Of these, those that a hit can skip: the last token is always computed."""
        return (self.num_tokens - 1) // self.block_size

    @cached_property
    def block_tokens(self) -> np.ndarray:
        """Tokens in each block, int64 [num_blocks]."""
        tokens = np.full(len(self.content_keys), self.block_size, dtype=np.int64)
        tokens[self.starts[1:] - 1] = self.num_tokens - (self.num_blocks - 1) * self.block_size
        return tokens

    @cached_property
    def repeats(self) -> np.ndarray:
        """Which blocks hold what one before them holds, bool [num_blocks]."""
        return _previous_occurrence(self.content_keys) >= 0

    @cached_property
    def unbounded_hits(self) -> np.ndarray:
        """Blocks of each request that a cache without a bound lets skip, int64 [num_requests]."""
        _, first, inverse = np.unique(self.prefix_keys, return_index=True, return_inverse=True)
        of_request = np.repeat(np.arange(len(self.requests)), self.num_blocks)
        # A key counts from the request after the one where it first is a full block.
        depth = np.arange(len(self.prefix_keys)) - self.starts[of_request]
        full = depth < self.num_full_blocks[of_request]
        never = len(self.requests)
        first_full = np.full(len(first), never)
        np.minimum.at(first_full, inverse[full], of_request[full])
        missed = (first_full[inverse] >= of_request) | ~full
        missed_at = np.where(missed, depth, never + len(depth))
        leading = np.minimum.reduceat(missed_at, self.starts[:-1])
        return np.minimum(np.minimum(leading, self.num_blocks), self.num_skippable_blocks)

    @cached_property
    def shared_tokens(self) -> np.ndarray:
        """Leading tokens of each prompt that an earlier one starts with too, int64 [num_requests].

        What a cache without a bound and with blocks of one token would let skip.
        """
        longest: dict[tuple[object, int], int] = {}
        shared = np.zeros(len(self.requests), dtype=np.int64)
        for i, request in enumerate(self.requests):
            parent: object = request.extra_key
            matching = True
            for segment in request.segments:
                key = (parent, segment.id)
                known = longest.get(key, 0)
                if matching:
                    shared[i] += min(known, segment.num_tokens)
                    matching = known >= segment.num_tokens
                longest[key] = max(known, segment.num_tokens)
                parent = hash((key, segment.num_tokens))
        return np.minimum(shared, self.num_tokens - 1)

    @cached_property
    def reuse(self) -> Reuse:
        """Reuse distances and times, over content keys in the order of the trace.

        Nothing for more than MAX_REUSE_REFERENCES blocks, where it would take minutes.
        """
        if len(self.content_keys) > MAX_REUSE_REFERENCES:
            return Reuse(np.zeros(0, dtype=np.int64), np.zeros(0))
        previous = _previous_occurrence(self.content_keys)
        again = np.flatnonzero(previous >= 0)
        # Of the references in between, those whose key occurred before in between are left out.
        repeated = _num_larger_before(previous)
        distances = again - previous[again] - 1 - repeated[again]
        arrivals = np.repeat([request.arrival_s for request in self.requests], self.num_blocks)
        return Reuse(distances, arrivals[again] - arrivals[previous[again]])


def make_references(workload: Workload, block_size: int, seed: int = 0) -> References:
    """Read a workload and name the blocks of its prompts.

    Raises InputError where nothing says what prompts share, ConfigError for a block size that the
    ids of a trace cannot be divided into.
    """
    requests = list(workload)
    if not any(request.segments for request in requests):
        raise InputError(
            f"workload.name={workload.name}: its requests carry no hash ids and share nothing; "
            "replay needs a trace with hash_ids or a workload with shared prompts"
        )
    num_tokens = np.array([request.num_prompt_tokens for request in requests], dtype=np.int64)
    starts = np.zeros(len(requests) + 1, dtype=np.int64)
    np.cumsum(-(-num_tokens // block_size), out=starts[1:])
    if isinstance(workload, MooncakeTrace):
        content = _keys_from_ids(requests, num_tokens, starts, block_size)
        # The prefix of a block is the sum of what stands where, as in `cache.content_hash`.
        depth = np.arange(len(content)) - np.repeat(starts[:-1], np.diff(starts))
        terms = mix(content.view(np.uint64) * GOLDEN_GAMMA + mix(depth.astype(np.uint64)))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms)])
        prefix = (sums[1:] - np.repeat(sums[starts[:-1]], np.diff(starts))).view(np.int64)
    else:
        content = prefix = _keys_from_tokens(requests, starts, block_size, seed)
    return References(requests, block_size, num_tokens, starts, content, prefix)


def _keys_from_ids(
    requests: list[Request], num_tokens: np.ndarray, starts: np.ndarray, block_size: int
) -> np.ndarray:
    """Content keys: for blocks of 512 tokens the ids themselves, numbered anew from 0."""
    ids = np.array([segment.id for r in requests for segment in r.segments], dtype=np.int64)
    ids = np.unique(ids, return_inverse=True)[1].astype(np.int64)
    if block_size == MOONCAKE_TOKENS_PER_ID:
        return ids
    id_starts = np.zeros(len(requests) + 1, dtype=np.int64)
    np.cumsum(-(-num_tokens // MOONCAKE_TOKENS_PER_ID), out=id_starts[1:])
    depth = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    first_id = np.repeat(id_starts[:-1], np.diff(starts))
    if MOONCAKE_TOKENS_PER_ID % block_size == 0:
        parts = MOONCAKE_TOKENS_PER_ID // block_size
        return ids[first_id + depth // parts] * parts + depth % parts
    if block_size % MOONCAKE_TOKENS_PER_ID == 0:
        per_block = block_size // MOONCAKE_TOKENS_PER_ID
        place = np.arange(len(ids)) - np.repeat(id_starts[:-1], np.diff(id_starts))
        terms = mix(ids.view(np.uint64) * MIX_1 + mix((place % per_block).astype(np.uint64)))
        return np.add.reduceat(terms, first_id + depth * per_block).view(np.int64)
    raise ConfigError(
        f"cache.block_size={block_size}: expected a divisor or a multiple of "
        f"{MOONCAKE_TOKENS_PER_ID}, the tokens that one hash id of this trace stands for"
    )


def _keys_from_tokens(
    requests: list[Request], starts: np.ndarray, block_size: int, seed: int
) -> np.ndarray:
    """Chained content hashes; a partly filled block has a key of its own."""
    hasher = ContentHasher(block_size, seed)
    keys = np.empty(starts[-1], dtype=np.int64)
    for i, request in enumerate(requests):
        hashes = block_hashes(request, hasher)
        keys[starts[i] : starts[i] + len(hashes)] = hashes
        keys[starts[i] + len(hashes) : starts[i + 1]] = -1 - i
    return keys


def block_hashes(request: Request, hasher: ContentHasher) -> np.ndarray:
    """The content hashes of a prompt's full blocks, int64 [num_full_blocks]."""
    tokens = request.prompt_token_ids()
    num_full = len(tokens) // hasher.block_size
    blocks = tokens[: num_full * hasher.block_size].reshape(num_full, hasher.block_size)
    return hasher.hash_chain(blocks, hasher.root(request.extra_key))


def _previous_occurrence(keys: np.ndarray) -> np.ndarray:
    """The index of the last equal key before each one, or -1, int64 [n]."""
    order = np.argsort(keys, kind="stable")
    previous = np.full(len(keys), -1, dtype=np.int64)
    repeats = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
    previous[order[repeats + 1]] = order[repeats]
    return previous


def _num_larger_before(values: np.ndarray) -> np.ndarray:
    """How many values before each one are larger, int64 [n]; a merge sort, level by level."""
    count = len(values)
    larger = np.zeros(count, dtype=np.int64)
    # Ranks make values distinct: of equal ones a later one is larger.
    ranks = np.empty(count, dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(count)
    width = 1
    while width < count:
        block = np.arange(count) // (2 * width)
        order = np.argsort(block * count + ranks, kind="stable")
        is_left = (order // width) % 2 == 0
        lefts = np.cumsum(is_left)
        of_block = block[order]
        block_start = np.searchsorted(of_block, np.arange(of_block[-1] + 1))
        lefts_before = np.concatenate([[0], lefts])[block_start][of_block]
        num_left = np.bincount(of_block, weights=is_left).astype(np.int64)[of_block]
        right = ~is_left
        larger[order[right]] += (num_left - (lefts - lefts_before))[right]
        width *= 2
    return larger
