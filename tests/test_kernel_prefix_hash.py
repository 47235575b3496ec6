"""Device hashes, the device index and match_prefix agree with the host's, bit for bit."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

import cache.content_hash
import cache.prefix_index
import kernels.prefix_hash as module
from cache.content_hash import ContentHasher
from cache.prefix_caching import PrefixCachingBlockAllocator
from cache.prefix_index import PrefixIndex
from kernels import reference
from kernels.launch import INTERPRETER, TARGETS, hash_tiles, record_launches
from kernels.prefix_hash import (
    DevicePrefixIndex,
    hash_blocks,
    index_shift,
    make_hash_keys,
    match_prefix,
    prefix_hash_gather,
)
from kernels.testing import SENTINEL, guarded, is_poison, mutant, poisoned, traffic_meter

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZES = [1, 2, 3, 8, 12, 16, 48, 128, 544]
interpreted = pytest.mark.skipif(DEVICE != "cpu", reason="needs the interpreter and CPU memory")


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def hash_keys_of(hasher: ContentHasher) -> torch.Tensor:
    return make_hash_keys(
        hasher.word_keys, hasher.word_multipliers, hasher.position_multiplier, DEVICE
    )


def full_blocks(tokens: np.ndarray, length: int, block_size: int) -> np.ndarray:
    count = length // block_size
    return np.ascontiguousarray(tokens[: count * block_size]).reshape(count, block_size)


def test_host_and_device_use_the_same_constants() -> None:
    for name in ("FOLD", "MIX_1", "MIX_2"):
        assert getattr(module, name).value == getattr(cache.content_hash, name)
    for name in ("BUCKET_SIZE", "EMPTY"):
        assert getattr(module, name).value == getattr(cache.prefix_index, name)


@pytest.mark.parametrize("capacity", [1, 4, 100, 5000])
def test_host_and_device_agree_on_the_home_bucket(capacity: int) -> None:
    index = PrefixIndex(capacity)
    assert index_shift(index.num_buckets) == index.shift


# ---- hash_blocks


def check_hashes(hash_module: ModuleType, block_size: int, num_long: int = 130) -> None:
    """Lengths around whole blocks and tiles, tokens over all of int32, garbage behind each."""
    hasher = ContentHasher(block_size, seed=block_size)
    rng = np.random.default_rng(block_size)
    long = (num_long if block_size <= 16 else 5) * block_size
    lengths = [0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size, long + 1]
    tokens = rng.integers(-(2**31), 2**31, (len(lengths), long + 3), dtype=np.int32)
    roots = np.array([hasher.root(("tenant", i)) for i in range(len(lengths))])
    width = tokens.shape[1] // block_size
    out = poisoned(len(lengths), width + 2, dtype=torch.int64, device=DEVICE)[:, 1:-1]
    arguments = (
        on_device(tokens),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        on_device(roots),
        hash_keys_of(hasher),
        block_size,
    )
    hash_module.hash_blocks(*arguments, out)
    for row, length in enumerate(lengths):
        want = hasher.hash_chain(full_blocks(tokens[row], length, block_size), roots[row])
        got = out[row].cpu().numpy()
        assert np.array_equal(got[: len(want)], want), f"length {length}"
        assert not got[len(want) :].any(), f"length {length}"
    assert (out._base[:, [0, -1]] == SENTINEL).all()
    assert torch.equal(out, reference.hash_blocks(*arguments))


@pytest.mark.gpu_first
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_hashes_equal_the_host_s(block_size: int) -> None:
    check_hashes(module, block_size)


def test_a_batch_of_nothing() -> None:
    keys = hash_keys_of(ContentHasher(4, seed=0))
    for shape in ((0, 9), (2, 0), (2, 3)):
        prompts = (
            torch.zeros(shape, dtype=torch.int32, device=DEVICE),
            torch.full(shape[:1], shape[1], dtype=torch.int32, device=DEVICE),
            torch.zeros(shape[0], dtype=torch.int64, device=DEVICE),
            keys,
        )
        assert hash_blocks(*prompts, 4).shape == (shape[0], shape[1] // 4)
        tables, lens = DevicePrefixIndex(2, 3, 4, DEVICE).match(*prompts)
        assert tables.shape == (shape[0], max(0, shape[1] - 1) // 4)
        assert (tables == -1).all()
        assert torch.equal(lens, torch.zeros_like(lens))


# ---- match_prefix


class Setting(NamedTuple):
    """Prompts, and an index and pool that hold `num_cached` of the first prompt's blocks."""

    hasher: ContentHasher
    index: PrefixIndex
    pool_token_ids: np.ndarray
    computed: np.ndarray
    prompts: list[np.ndarray]
    extra_keys: list[object]

    def arguments(self, padding: int = 5) -> tuple[torch.Tensor, ...]:
        """The arguments of `match_prefix`; behind each prompt lie random tokens."""
        lengths = [len(prompt) for prompt in self.prompts]
        rng = np.random.default_rng(7)
        shape = (len(lengths), max(lengths) + padding)
        tokens = rng.integers(-(2**31), 2**31, shape, dtype=np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        roots = np.array([self.hasher.root(key) for key in self.extra_keys])
        return (
            on_device(tokens),
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            on_device(roots),
            hash_keys_of(self.hasher),
            on_device(self.index.keys),
            on_device(self.index.block_ids),
            on_device(self.pool_token_ids),
            on_device(self.computed),
        )

    def host_match(self, row: int) -> np.ndarray:
        """The matched blocks of one prompt, from the host's index and numpy alone."""
        prompt, block_size = self.prompts[row], self.hasher.block_size
        blocks = full_blocks(prompt, max(0, len(prompt) - 1), block_size)
        hashes = self.hasher.hash_chain(blocks, self.hasher.root(self.extra_keys[row]))
        found = self.index.lookup(hashes)
        good = (found >= 0) & self.computed[found]
        good &= (self.pool_token_ids[found] == blocks).all(axis=1)
        return found[: len(good) if good.all() else good.argmin()]


def make_setting(
    block_size: int, num_cached: int, capacity: int | None = None, seed: int = 0
) -> Setting:
    """One chain cached in shuffled blocks, and prompts that share more or less of it."""
    rng = np.random.default_rng(seed)
    hasher = ContentHasher(block_size, seed=seed)
    chain = rng.integers(-(2**31), 2**31, (num_cached, block_size), dtype=np.int32)
    num_blocks = num_cached + 3
    ids = rng.permutation(num_blocks)[:num_cached].astype(np.int32)
    pool = rng.integers(0, 100, (num_blocks, block_size), dtype=np.int32)
    pool[ids] = chain
    index = PrefixIndex(capacity or num_blocks)
    index.insert(hasher.hash_chain(chain, hasher.root("a")), ids)
    flat = chain.ravel()
    changed = flat.copy()
    changed[len(flat) // 2] ^= 1
    longer = np.append(flat, rng.integers(0, 9, 2 * block_size, dtype=np.int32))
    prompts = [flat, longer, flat[:-1], changed, flat[: block_size + 1], flat[:block_size], longer]
    keys = ["a", "a", "a", "a", "a", "a", b"a"]
    prompts.append(flat[:0])
    keys.append("a")
    return Setting(hasher, index, pool, np.ones(num_blocks, dtype=bool), prompts, keys)


def check_match(match_module: ModuleType, setting: Setting) -> list[int]:
    """Match, compare with the host and the reference, and return the matched lengths."""
    arguments = setting.arguments()
    num_seqs, max_blocks = (
        len(setting.prompts),
        (arguments[0].shape[1] - 1) // arguments[6].shape[1],
    )
    table = guarded(num_seqs, max_blocks, dtype=torch.int32, device=DEVICE)
    lens = guarded(num_seqs, dtype=torch.int32, device=DEVICE)
    match_module.match_prefix(*arguments, block_tables=table.tensor, matched_lens=lens.tensor)
    for row in range(num_seqs):
        want = setting.host_match(row)
        got = table.tensor[row].cpu().numpy()
        assert np.array_equal(got[: len(want)], want), f"prompt {row}"
        assert (got[len(want) :] == -1).all(), f"prompt {row}"
        assert lens.tensor[row] == len(want) * setting.hasher.block_size, f"prompt {row}"
    table.assert_guards_intact()
    lens.assert_guards_intact()
    wanted = reference.match_prefix(*arguments, block_tables=torch.empty_like(table.tensor))
    assert torch.equal(table.tensor, wanted[0])
    assert torch.equal(lens.tensor, wanted[1])
    return lens.tensor.tolist()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_matches_equal_the_host_s(block_size: int) -> None:
    num_cached = 2 * hash_tiles(INTERPRETER, block_size).tile_blocks + 3
    lens = check_match(module, make_setting(block_size, num_cached))
    whole = num_cached * block_size
    assert lens[:3] == [
        whole - block_size,
        whole,
        (whole - 2) // block_size * block_size,
    ]
    assert lens[3] == num_cached // 2 * block_size
    assert lens[4:] == [block_size, 0, 0, 0]


def test_one_token_is_left_to_compute() -> None:
    """A22: a prompt of whole cached blocks is matched up to its last block only."""
    setting = make_setting(4, 2)
    prompt = setting.prompts[0]
    assert len(prompt) == 8
    lens = check_match(
        module, setting._replace(prompts=[prompt, setting.prompts[1]], extra_keys="aa")
    )
    assert lens == [4, 8]


@pytest.mark.parametrize("seed", range(6))
def test_full_buckets_are_probed_past(seed: int) -> None:
    """16 entries hold 15 hashes: whatever their homes, one bucket is full and some spill."""
    setting = make_setting(2, 15, capacity=3, seed=seed)
    assert setting.index.num_buckets == 2
    assert setting.index.keys.all(axis=1).any()
    check_match(module, setting)


def test_a_full_table_ends_the_search() -> None:
    """A hash that isn't in a table without free entries is a miss, not an endless loop."""
    setting = make_setting(2, 16, capacity=3)
    assert setting.index.keys.all()
    arguments = setting.arguments()
    lens = match_prefix(*arguments).matched_lens
    assert lens.tolist() == reference.match_prefix(*arguments)[1].tolist()
    assert lens[6] == 0


def test_an_uncomputed_block_ends_the_match() -> None:
    """A03: cached is not computed."""
    setting = make_setting(4, 9)
    third = setting.host_match(1)[2]
    setting.computed[third] = False
    assert check_match(module, setting)[:2] == [8, 8]
    setting.computed[:] = False
    assert not any(check_match(module, setting))


def test_a_hash_alone_makes_no_hit() -> None:
    """A16: the block with the prompt's hash holds other tokens in one place, the first or last."""
    for at, change in ((0, 1 << 31), (-1, 1), (4, 1)):
        setting = make_setting(5, 9)
        fourth = setting.host_match(1)[3]
        setting.pool_token_ids.view(np.uint32)[fourth, at] ^= np.uint32(change)
        assert check_match(module, setting)[1] == 15


def test_block_ids_outside_the_pool_are_misses() -> None:
    """An index that is ahead of the pool must not turn into an address."""
    setting = make_setting(4, 3)
    arguments = list(setting.arguments())
    for outside in (-7, len(setting.computed), 2**31 - 1):
        arguments[5] = torch.full_like(arguments[5], outside)
        tables, lens = match_prefix(*arguments)
        assert (tables == -1).all()
        assert not lens.any()


def test_the_table_s_width_bounds_the_match() -> None:
    arguments = make_setting(4, 9).arguments()
    table = poisoned(8, 5, dtype=torch.int32, device=DEVICE)
    _, lens = match_prefix(*arguments, block_tables=table[:, 1:4])
    assert lens.tolist()[:2] == [12, 12]
    assert (table[:, [0, 4]] == SENTINEL).all()


def test_a_length_beyond_the_row_reads_only_the_row() -> None:
    arguments = list(make_setting(4, 9).arguments(padding=0))
    before = match_prefix(*arguments)
    arguments[1] = torch.where(arguments[1] == arguments[0].shape[1], 2**31 - 1, arguments[1])
    after = match_prefix(*arguments)
    assert torch.equal(before.block_tables, after.block_tables)


def test_strided_rows() -> None:
    """The prompts may be rows of a wider array, the tables columns of one."""
    arguments = list(make_setting(4, 9).arguments())
    wide = poisoned(16, arguments[0].shape[1] + 30, dtype=torch.int32, device=DEVICE)
    wide[::2, 3:-27] = arguments[0]
    pool = poisoned(*arguments[6].shape[:1], 11, dtype=torch.int32, device=DEVICE)
    pool[:, 2:6] = arguments[6]
    want = match_prefix(*arguments)
    arguments[0], arguments[6] = wide[::2, 3:-27], pool[:, 2:6]
    got = match_prefix(*arguments)
    assert torch.equal(got.block_tables, want.block_tables)
    assert torch.equal(got.matched_lens, want.matched_lens)


# ---- the whole: the block manager's allocator and a device index that follows it


@pytest.mark.parametrize("block_size", [1, 4, 5])
@pytest.mark.parametrize("seed", range(2))
def test_random_workloads_with_evictions_and_extra_keys(block_size: int, seed: int) -> None:
    """After every step the device finds what the allocator's `find_cached_prefix` finds."""
    rng = np.random.default_rng(seed)
    num_blocks = 24
    allocator = PrefixCachingBlockAllocator(
        num_blocks, block_size, hasher=ContentHasher(block_size, seed), track_index_changes=True
    )
    pool = allocator.pool
    device_index = DevicePrefixIndex(allocator.index.num_buckets, num_blocks, block_size, DEVICE)
    hash_keys = hash_keys_of(allocator.hasher)
    extra_keys = [None, "x", b"x", ("x", 1)]
    running: list[np.ndarray] = []
    hits = 0
    for step in range(20):
        length = int(rng.integers(1, 7 * block_size))
        prompt = rng.integers(0, 2, length, dtype=np.int32)
        extra_key = extra_keys[rng.integers(len(extra_keys))]
        plan = allocator.plan(prompt, length, allocator.hasher.root(extra_key))
        while plan.num_taken > allocator.num_free:
            allocator.release(running.pop(0))
            plan = allocator.plan(prompt, length, allocator.hasher.root(extra_key))
        ids = allocator.allocate_sequence(prompt, plan)
        running.append(ids)
        if rng.random() < 0.8:
            allocator.mark_computed(ids)
        if rng.random() < 0.5:
            allocator.release(running.pop(0))

        slots, keys, block_ids = allocator.index.drain_changes()
        computed = pool.computed[block_ids]
        device_index.apply_changes(slots, keys, block_ids, pool.token_ids[block_ids], computed)
        device_index.set_computed(np.flatnonzero(pool.cached & pool.computed))

        asked = [prompt, *(rng.integers(0, 2, rng.integers(0, 40), dtype=np.int32) for _ in "ab")]
        asked += [prompt] * len(extra_keys)
        keys_asked = [extra_key, None, "x", *extra_keys]
        setting = Setting(
            allocator.hasher, allocator.index, pool.token_ids, pool.computed, asked, keys_asked
        )
        tables, lens = device_index.match(*setting.arguments()[:3], hash_keys)
        for row, (tokens, key) in enumerate(zip(asked, keys_asked, strict=True)):
            want = allocator.find_cached_prefix(tokens, key)
            got = tables[row].cpu().numpy()
            assert np.array_equal(got[: len(want)], want), f"step {step}, prompt {row}"
            assert lens[row] == len(want) * block_size
            hits += len(want)
    assert allocator.stats.evictions > 0
    assert hits > 0


def check_patches(index_module: ModuleType) -> None:
    """Full buckets, removals that pull entries back, and clear, all by `drain_changes`."""
    rng = np.random.default_rng(0)
    index = PrefixIndex(4, track_changes=True)
    device_index = index_module.DevicePrefixIndex(index.num_buckets, 64, 3, DEVICE)
    pool = np.zeros((64, 3), dtype=np.int32)
    computed = np.zeros(64, dtype=bool)
    live: dict[int, int] = {}
    for step in range(30):
        if step == 20:
            index.clear()
            live.clear()
        removed = rng.permutation(list(live))[: len(live) // 2].astype(np.int64)
        index.remove(removed)
        live = {key: value for key, value in live.items() if key not in removed}
        new = rng.integers(-(2**63), 2**63, 14 - len(live), dtype=np.int64)
        unused = np.setdiff1d(np.arange(64), list(live.values()))
        ids = rng.permutation(unused)[: len(new)].astype(np.int32)
        index.insert(new, ids)
        live.update(zip(new.tolist(), ids.tolist(), strict=True))
        pool[ids] = rng.integers(-(2**31), 2**31, (len(ids), 3), dtype=np.int32)
        computed[ids] = rng.random(len(ids)) < 0.5
        slots, keys, block_ids = index.drain_changes()
        device_index.apply_changes(slots, keys, block_ids, pool[block_ids], computed[block_ids])
        assert np.array_equal(device_index.keys.cpu().numpy(), index.keys)
        used = index.keys != 0
        assert np.array_equal(device_index.block_ids.cpu().numpy()[used], index.block_ids[used])
        assert np.array_equal(device_index.token_ids.cpu().numpy(), pool)
        assert np.array_equal(device_index.computed.cpu().numpy(), computed)
    newly = np.flatnonzero(~computed)[:5]
    device_index.set_computed(newly)
    computed[newly] = True
    assert np.array_equal(device_index.computed.cpu().numpy(), computed)
    device_index.set_computed(newly[:2], False)
    computed[newly[:2]] = False
    assert np.array_equal(device_index.computed.cpu().numpy(), computed)


def test_a_device_index_follows_by_patches_alone() -> None:
    check_patches(module)


# ---- prefix_hash_gather


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_matched_blocks_are_gathered(block_size: int) -> None:
    setting = make_setting(block_size, 6)
    arguments = setting.arguments()
    shape = (len(setting.computed), block_size, 2, 24)
    caches = [torch.randn(shape, device=DEVICE).half() for _ in range(3)]
    num_seqs, width = len(setting.prompts), (arguments[0].shape[1] - 1) // block_size
    out = [
        poisoned(num_seqs, width * block_size, 2, 24, dtype=torch.float16, device=DEVICE)
        for _ in caches
    ]
    result = prefix_hash_gather(*arguments, caches, out=out)
    want_tables, want_lens = match_prefix(*arguments)
    assert torch.equal(result.block_tables, want_tables)
    assert torch.equal(result.matched_lens, want_lens)
    assert result.matched_lens.any()
    for cache_, got in zip(caches, result.gathered, strict=True):
        for row, length in enumerate(want_lens.tolist()):
            blocks = want_tables[row, : length // block_size].long()
            assert torch.equal(got[row, :length], cache_[blocks].flatten(0, 1))
            assert is_poison(got[row, length:]).all()


@interpreted
def test_a_gather_moves_twice_the_matched_bytes() -> None:
    setting = make_setting(4, 6)
    arguments = setting.arguments()
    cache_ = torch.randn(len(setting.computed), 4, 2, 16)
    out = poisoned(len(setting.prompts), arguments[0].shape[1] // 4 * 4, 2, 16, dtype=torch.float32)
    out = out[:, : (arguments[0].shape[1] - 1) // 4 * 4].contiguous()
    with traffic_meter(cache=cache_, out=out) as traffic:
        result = prefix_hash_gather(*arguments, [cache_], out=[out])
    moved = int(result.matched_lens.sum()) * 2 * 16 * 4
    assert moved > 0
    assert (traffic.read["cache"], traffic.written["out"]) == (moved, moved)
    assert (traffic.read["out"], traffic.written["cache"]) == (0, 0)


# ---- traffic


@interpreted
def test_a_matched_prompt_s_tokens_are_read_once() -> None:
    """Every token of the blocks that may match once, the stored ones once, the last ones never."""
    setting = make_setting(16, 150)
    setting = setting._replace(prompts=setting.prompts[1:2], extra_keys=["a"])
    arguments = setting.arguments(padding=100)
    tokens, pool, keys = arguments[0], arguments[6], arguments[4]
    with traffic_meter(tokens=tokens, pool=pool, keys=keys) as traffic:
        match_prefix(*arguments)
    matchable = (len(setting.prompts[0]) - 1) // 16
    assert matchable == 151
    assert traffic.read["tokens"] == matchable * 16 * 4
    assert traffic.read["pool"] == 150 * 16 * 4
    assert matchable * 64 <= traffic.read["keys"] <= 1.1 * matchable * 64


@interpreted
@pytest.mark.parametrize("break_at", [0, 5, 64, 100])
def test_nothing_is_read_after_the_tile_where_the_chain_breaks(break_at: int) -> None:
    setting = make_setting(16, 300)
    tile = hash_tiles(INTERPRETER, 16).tile_blocks
    prompt = setting.prompts[1].copy()
    prompt[break_at * 16] ^= 1
    setting = setting._replace(prompts=[prompt], extra_keys=["a"])
    arguments = setting.arguments()
    with traffic_meter(tokens=arguments[0], pool=arguments[6], keys=arguments[4]) as traffic:
        _, lens = match_prefix(*arguments)
    assert lens.tolist() == [break_at * 16]
    read_blocks = (break_at // tile + 1) * tile
    assert traffic.read["tokens"] == read_blocks * 16 * 4
    assert traffic.read["pool"] == break_at * 16 * 4
    assert traffic.read["keys"] <= 1.1 * read_blocks * 64


# ---- errors


def bad_arguments() -> dict[str, tuple[int, torch.Tensor]]:
    """Message -> (which argument of `match_prefix`, its bad value)."""

    def tensor(*shape: int, dtype: torch.dtype = torch.int32, device: str = DEVICE) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return {
        r"token_ids has shape \[20\]": (0, tensor(20)),
        "token_ids is int64": (0, tensor(8, 41, dtype=torch.int64)),
        "token_ids has strides": (0, tensor(41, 8).T),
        r"seq_lens has shape \[7\]": (1, tensor(7)),
        "seq_lens is int64": (1, tensor(8, dtype=torch.int64)),
        "roots is int32": (2, tensor(8)),
        r"roots has shape \[9\]": (2, tensor(9, dtype=torch.int64)),
        r"hash_keys has shape \[7\], not \[5\]": (3, tensor(7, dtype=torch.int64)),
        r"index_keys has shape \[2, 4\]": (4, tensor(2, 4, dtype=torch.int64)),
        "index_keys has 3 buckets": (4, tensor(3, 8, dtype=torch.int64)),
        "index_keys is int32": (4, tensor(4, 8)),
        r"index_block_ids has shape \[1, 8\]": (5, tensor(1, 8)),
        r"pool_token_ids has shape \[12\]": (6, tensor(12)),
        "pool_token_ids is int16": (6, tensor(12, 4, dtype=torch.int16)),
        r"computed has shape \[3\]": (7, tensor(3, dtype=torch.bool)),
        "computed is float32": (7, tensor(12, dtype=torch.float32)),
        "computed is on meta": (7, tensor(12, dtype=torch.bool, device="meta")),
        "seq_lens is on meta": (1, tensor(8, device="meta")),
    }


@pytest.mark.parametrize("message", bad_arguments())
def test_arguments_that_do_not_fit_are_refused(message: str) -> None:
    setting = make_setting(4, 9)
    arguments = list(setting.arguments())
    assert arguments[0].shape[0] == 8
    assert arguments[6].shape == (12, 4)
    at, value = bad_arguments()[message]
    arguments[at] = value
    with pytest.raises(ValueError, match=message):
        match_prefix(*arguments)


def test_outputs_and_caches_that_do_not_fit_are_refused() -> None:
    arguments = make_setting(4, 9).arguments()
    int64 = {"dtype": torch.int64, "device": DEVICE}
    with pytest.raises(ValueError, match="block_tables is int64"):
        match_prefix(*arguments, block_tables=torch.zeros(8, 3, **int64))
    with pytest.raises(ValueError, match=r"matched_lens has shape \[9\]"):
        match_prefix(*arguments, matched_lens=torch.zeros(9, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="out has 2 columns for 12 blocks"):
        hash_blocks(*arguments[:4], 4, torch.zeros(8, 2, **int64))
    with pytest.raises(ValueError, match="block_size is 0"):
        hash_blocks(*arguments[:4], 0)
    with pytest.raises(ValueError, match="block_size is 5000"):
        hash_blocks(*arguments[:4], 5000)
    cache_ = torch.zeros(12, 4, 1, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"pool_token_ids has shape \[12, 4\], not \[11, 4\]"):
        prefix_hash_gather(*arguments, [cache_[:11]])
    with pytest.raises(ValueError, match=r"out\[0\] has shape \[8, 40, 1, 8\]"):
        prefix_hash_gather(*arguments, [cache_], out=[torch.zeros(8, 40, 1, 8, device=DEVICE)])
    out = prefix_hash_gather(*arguments, [cache_]).gathered[0]
    inside = out.view(-1)[: cache_.numel()].view(cache_.shape)
    with pytest.raises(ValueError, match=r"out\[0\] and caches\[0\] share memory"):
        prefix_hash_gather(*arguments, [inside], out=[out])
    with pytest.raises(ValueError, match="out holds 0 tensors, caches 1"):
        prefix_hash_gather(*arguments, [cache_], out=[])


def test_changes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="num_buckets is 3"):
        DevicePrefixIndex(3, 8, 4, DEVICE)
    device_index = DevicePrefixIndex(2, 8, 4, DEVICE)

    def apply(slots: list[int], keys: list[int], ids: list[int], width: int = 4) -> None:
        rows = np.zeros((len(slots), width), dtype=np.int32)
        flags = np.zeros(len(slots), dtype=bool)
        device_index.apply_changes(np.array(slots), np.array(keys), np.array(ids), rows, flags)

    with pytest.raises(ValueError, match=r"slot 16 is outside \[0, 16\)"):
        apply([16], [5], [0])
    with pytest.raises(ValueError, match="slot 3 occurs 2 times"):
        apply([3, 3], [5, 6], [0, 1])
    with pytest.raises(ValueError, match=r"block id 8 is outside \[0, 8\)"):
        apply([3], [5], [8])
    with pytest.raises(ValueError, match="block id 2 occurs 2 times"):
        apply([3, 4], [5, 6], [2, 2])
    with pytest.raises(ValueError, match=r"token_ids has shape \(1, 3\)"):
        apply([3], [5], [0], width=3)
    with pytest.raises(ValueError, match=r"keys has shape \(2,\)"):
        apply([3], [5, 6], [0])
    with pytest.raises(ValueError, match=r"block id -1 is outside"):
        device_index.set_computed(np.array([-1]))
    assert not device_index.keys.any()
    apply([3], [0], [99])
    assert not device_index.token_ids.any()


CHANGE = {"slots": [3], "keys": [5], "block_ids": [1], "token_ids": [[1, 2, 3, 4]], "computed": [1]}
BAD_CHANGES = {
    "token_ids holds 1099511627779, which is outside": {"token_ids": [[1, 2**40 + 3, 3, 4]]},
    "token_ids holds -2147483649": {"token_ids": [[-(2**31) - 1, 2, 3, 4]]},
    r"token_ids holds .*1\.0.*; expected integers": {"token_ids": np.ones((1, 4))},
    r"slots holds .*3\.0": {"slots": [3.0]},
    "slots holds True": {"slots": [True]},
    r"slots has shape \(1, 1\); expected \(1,\)": {"slots": [[3]]},
    "keys holds 9223372036854775808": {"keys": np.array([2**63], dtype=np.uint64)},
    "keys holds 73786976294838206464": {"keys": [2**66]},
    r"keys holds .*5\.5": {"keys": [5.5]},
    "block_ids holds .*True": {"block_ids": [True]},
    "block_ids holds 36893488147419103232": {"block_ids": [2**65]},
    r"block id 4294967297 is outside \[0, 8\)": {"block_ids": [2**32 + 1]},
    "computed holds 256; expected a flag": {"computed": [256]},
    r"computed holds .*0\.5": {"computed": [0.5]},
    r"computed has shape \(2,\)": {"computed": [True, False]},
}


@pytest.mark.parametrize("message", BAD_CHANGES)
def test_a_change_that_would_be_stored_as_another_is_refused(message: str) -> None:
    index = DevicePrefixIndex(2, 8, 4, DEVICE)
    with pytest.raises(ValueError, match=message):
        index.apply_changes(**{**CHANGE, **BAD_CHANGES[message]})
    for tensor in (index.keys, index.block_ids, index.token_ids, index.computed):
        assert not tensor.any()


@pytest.mark.parametrize("make", [list, np.array], ids=["lists", "arrays"])
def test_changes_may_be_lists_or_arrays(make) -> None:
    index = DevicePrefixIndex(2, 8, 4, DEVICE)
    index.apply_changes(**{name: make(values) for name, values in CHANGE.items()})
    assert index.keys.view(-1)[3] == 5
    assert index.block_ids.view(-1)[3] == 1
    assert index.token_ids[1].tolist() == [1, 2, 3, 4]
    assert index.computed.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    index.set_computed(make([0, 7]))
    index.set_computed(make([1]), False)
    index.set_computed(make([]))
    assert index.computed.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]


def test_flags_are_no_block_ids() -> None:
    index = DevicePrefixIndex(2, 8, 4, DEVICE)
    for ids, computed, message in (
        ([True, False, True], True, "block_ids holds True"),
        ([1.0], True, r"block_ids holds .*1\.0"),
        ([1], 2, "computed holds 2"),
        ([1], [True], r"computed has shape \(1,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            index.set_computed(ids, computed)
    assert not index.computed.any()


def test_hash_keys_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"word_multipliers has shape \(3,\); expected \(2,\)"):
        make_hash_keys([1, 2], [1, 2, 3], 5, DEVICE)
    with pytest.raises(ValueError, match="word_keys holds -1"):
        make_hash_keys([1, -1], [1, 2], 5, DEVICE)
    with pytest.raises(ValueError, match="position_multiplier holds 18446744073709551616"):
        make_hash_keys([1, 2], [1, 2], 2**64, DEVICE)
    assert make_hash_keys([1, 2**64 - 1], [3, 4], 5, DEVICE).tolist() == [1, -1, 3, 4, 5]


# ---- sizes


def test_the_grid_grows_on_its_first_axis_only() -> None:
    """B14: 70,000 sequences are no problem on axis 0."""
    setting = make_setting(4, 9)
    arguments = list(setting.arguments())
    arguments[0] = arguments[0][:1].expand(70_000, -1)
    arguments[1] = arguments[1][:1].expand(70_000).contiguous()
    arguments[2] = arguments[2][:1].expand(70_000).contiguous()
    with record_launches(TARGETS["sm_90"]) as launches:
        match_prefix(*arguments)
        hash_blocks(*arguments[:4], 4)
    assert [launch.grid for launch in launches] == [(70_000,), (70_000,)]


@pytest.mark.gpu
def test_70_000_sequences() -> None:
    """B14: they run, too."""
    setting = make_setting(16, 40)
    arguments = list(setting.arguments())
    for at in range(3):
        arguments[at] = arguments[at].repeat(8_750, *[1] * (arguments[at].ndim - 1))
    small = reference.match_prefix(*setting.arguments())
    tables, lens = match_prefix(*arguments)
    assert torch.equal(tables, small[0].repeat(8_750, 1))
    assert torch.equal(lens, small[1].repeat(8_750))


@pytest.mark.gpu
def test_a_captured_match_follows_its_buffers() -> None:
    """B20: nothing in a launch waits for the device or depends on what it holds."""
    setting = make_setting(16, 40)
    arguments = setting.arguments()
    lens = arguments[1].clone()
    want = match_prefix(*arguments)
    table, matched = torch.empty_like(want.block_tables), torch.empty_like(want.matched_lens)
    arguments[1].fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        match_prefix(*arguments, block_tables=table, matched_lens=matched)
    graph.replay()
    assert not matched.any()
    arguments[1].copy_(lens)
    graph.replay()
    assert torch.equal(table, want.block_tables)
    assert torch.equal(matched, want.matched_lens)


def far_rows(rows: torch.Tensor) -> torch.Tensor:
    """A copy whose rows lie 2^30 elements apart, with 2^31 untouched elements on either side."""
    num_rows, row = len(rows), 1 << 30
    size = rows.element_size() * ((4 + num_rows) * row)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    storage = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=rows.dtype)
    return storage.as_strided(rows.shape, (row, 1), 2 * row).copy_(rows)


def check_far_pool_rows(match_module: ModuleType) -> None:
    """A pool whose rows reach beyond 2^31 elements."""
    setting = make_setting(4, 3)
    arguments = list(setting.arguments())
    want = reference.match_prefix(*arguments)
    arguments[6] = far_rows(arguments[6])
    assert setting.host_match(1).max() > 2
    got = match_module.match_prefix(*arguments)
    assert torch.equal(got.matched_lens, want[1])


def check_far_sequences(match_module: ModuleType) -> None:
    """Prompts and results whose rows reach beyond 2^31 elements."""
    arguments = list(make_setting(4, 9).arguments())
    want = reference.match_prefix(*arguments)
    want_hashes = reference.hash_blocks(*arguments[:4], 4)
    prompts, hashes = far_rows(arguments[0]), far_rows(torch.zeros_like(want_hashes))
    match_module.hash_blocks(prompts, *arguments[1:4], 4, hashes)
    assert torch.equal(hashes, want_hashes)
    tables = far_rows(torch.zeros_like(want[0]))
    got = match_module.match_prefix(prompts, *arguments[1:], block_tables=tables)
    assert torch.equal(tables, want[0])
    assert torch.equal(got.matched_lens, want[1])
    assert want[1][2:].any()


@interpreted
def test_sequences_beyond_2_31_elements() -> None:
    """Sequences meet their stride as int64."""
    check_far_sequences(module)


@interpreted
def test_pool_rows_beyond_2_31_elements() -> None:
    """Block ids meet their stride as int64."""
    check_far_pool_rows(module)


COMPILE = """
import json
import torch
import triton
from kernels.launch import INTERPRETER, TARGETS, hash_tiles, record_launches
from kernels.offline import OfflineCase, compile_key, compile_launch
from kernels.prefix_hash import DevicePrefixIndex, hash_blocks

target = TARGETS["sm_90"]
with record_launches(target) as launches:
    for num_seqs, length, num_buckets, num_blocks in (
        (1, 1, 1, 1), (3, 17, 16, 16), (16, 16, 64, 17), (17, 4096, 2, 999), (256, 100, 1024, 64)
    ):
        for skip in (0, 1):
            prompts = (
                torch.empty(num_seqs + skip, length + skip, dtype=torch.int32)[skip:, skip:],
                torch.empty(num_seqs + skip, dtype=torch.int32)[skip:],
                torch.empty(num_seqs + skip, dtype=torch.int64)[skip:],
                torch.empty(17, dtype=torch.int64),
            )
            hash_blocks(*prompts, 16)
            DevicePrefixIndex(num_buckets, num_blocks, 16, "cpu").match(*prompts)
keys = {name: {compile_key(x, target) for x in launches[i::2]} for i, name in enumerate("hm")}

asm = []
compile_ = triton.compile
triton.compile = lambda *args, **options: asm.append(compile_(*args, **options)) or asm[-1]
compile_launch(launches[1], OfflineCase("match_prefix", "int32", None), target)
print(json.dumps([{name: len(found) for name, found in keys.items()}, asm[0].asm["ttir"]]))
"""


def test_what_is_compiled() -> None:
    """B17: one compilation serves all sizes and slices; and the hash shifts logically.

    The interpreter follows numpy's types, the compiler Triton's: an arithmetic shift would show in
    the compiled kernel alone.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    counts, ttir = json.loads(done.stdout)
    assert counts == {"h": 1, "m": 1}
    assert ttir.count("arith.shrui") >= 6
    assert "arith.shrsi" not in ttir
    for constant in (module.FOLD, module.MIX_1, module.MIX_2):
        assert str(constant.value - 2**64) in ttir


# ---- mutations

HASH_MUTATIONS = {
    "odd-block-reads-on": ("mask=valid & (even + 1 < BLOCK_SIZE)", "mask=valid"),
    "position-from-0": ("(block + 1).to(tl.uint64)", "block.to(tl.uint64)"),
    "no-carry": (
        "        before += tl.sum(digest, axis=0)\n        start += TILE_BLOCKS\n\n",
        "        start += TILE_BLOCKS\n\n",
    ),
    "partial-block-hashed": ("max_seq_len) // BLOCK_SIZE\n", "max_seq_len) // BLOCK_SIZE + 1\n"),
    "wrong-shift": ("y ^= y >> 29", "y ^= y >> 30"),
    "sign-extended": (
        "low.to(tl.uint32, bitcast=True).to(tl.uint64)",
        "low.to(tl.int64).to(tl.uint64)",
    ),
}
MATCH_MUTATIONS = {
    "whole-prompt-matched": ("tl.maximum(seq_len - 1, 0)", "seq_len"),
    "tokens-not-compared": ("(lane < run) & equal", "(lane < run) & (equal | True)"),
    "odd-tokens-not-compared": (
        "differs = (low != pool_low) | (high != pool_high)",
        "differs = low != pool_low",
    ),
    "computed-not-asked": (", mask=lane < run, other=0) != 0", ", mask=lane < run, other=0) >= 0"),
    "no-second-bucket": ("probes = num_buckets", "probes = 1"),
    "never-stops-at-a-miss": ("limit = tl.where(run == TILE_BLOCKS, limit, 0)", "limit = limit"),
    "stops-after-a-tile": ("limit = tl.where(run == TILE_BLOCKS, limit, 0)", "limit = 0 * limit"),
    "rest-of-the-row-not-written": (
        "while start < max_blocks:\n        block = start + lane\n",
        "while start < 0:\n        block = start + lane\n",
    ),
    "home-is-the-low-bits": ("(hashes >> shift).to(tl.int64)", "wanted"),
    "first-entry-taken": ("bucket * BUCKET_SIZE + match", "bucket * BUCKET_SIZE"),
}
PATCH_MUTATIONS = {
    "half-a-key": ("(low | (high << 32))", "low"),
    "sign-of-the-low-half": (
        "low = tl.load(patch + 1).to(tl.uint32, bitcast=True).to(tl.uint64)",
        "low = tl.load(patch + 1).to(tl.int64).to(tl.uint64)",
    ),
    "tokens-not-patched": ("mask = token < BLOCK_SIZE\n", "mask = token < 0\n"),
    "last-token-not-patched": (
        "mask = token < BLOCK_SIZE\n",
        "mask = token < BLOCK_SIZE - 1\n",
    ),
    "flag-not-patched": (
        "tl.load(patch + 4).to(tl.uint8)",
        "(tl.load(patch + 4) * 0).to(tl.uint8)",
    ),
}


def check_all_matches(match_module: ModuleType) -> None:
    check_match(match_module, make_setting(2, 15, capacity=3))
    long = make_setting(16, 140)
    check_match(match_module, long)
    # A hole in the first tile of an otherwise cached chain.
    ids = long.host_match(1)
    long.computed[ids[3]] = False
    check_match(match_module, long)
    for at in (0, 1):
        setting = make_setting(16, 20)
        setting.pool_token_ids[setting.host_match(1)[3], at] ^= 1
        check_match(match_module, setting)


@interpreted
@pytest.mark.parametrize("name", HASH_MUTATIONS)
def test_the_hash_tests_catch(name: str) -> None:
    """A fault in the kernel's source turns the comparison with the host red."""
    block_size = 5 if name == "odd-block-reads-on" else 16
    with mutant(module, *HASH_MUTATIONS[name]) as hash_module, pytest.raises(AssertionError):
        check_hashes(hash_module, block_size)


@interpreted
@pytest.mark.parametrize("name", MATCH_MUTATIONS)
def test_the_match_tests_catch(name: str) -> None:
    """Likewise for the lookup."""
    with mutant(module, *MATCH_MUTATIONS[name]) as match_module, pytest.raises(AssertionError):
        check_all_matches(match_module)


@interpreted
@pytest.mark.parametrize("name", PATCH_MUTATIONS)
def test_the_patch_tests_catch(name: str) -> None:
    """Likewise for the updates of the index."""
    with mutant(module, *PATCH_MUTATIONS[name]) as index_module, pytest.raises(AssertionError):
        check_patches(index_module)


@interpreted
def test_unmutated_kernels_pass_those_checks() -> None:
    check_all_matches(module)


@interpreted
@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        (
            "found.to(tl.int64) * stride_pool_block",
            "found * stride_pool_block",
            check_far_pool_rows,
        ),
        (
            "seq = tl.program_id(0).to(tl.int64)\n    num_full",
            "seq = tl.program_id(0)\n    num_full",
            check_far_sequences,
        ),
        (
            "seq = tl.program_id(0).to(tl.int64)\n    lane",
            "seq = tl.program_id(0)\n    lane",
            check_far_sequences,
        ),
    ],
    ids=["pool-row", "hash-sequence", "match-sequence"],
)
def test_the_tests_catch_int32_addresses(old: str, new: str, check) -> None:
    with mutant(module, old, new) as match_module, pytest.raises(AssertionError):
        check(match_module)
