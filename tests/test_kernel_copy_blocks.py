"""copy_blocks: bit-equal block copies in every layout, dtype and order of pairs."""

import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import kernels.copy_blocks as module
from kernels import reference
from kernels.copy_blocks import AddressTables, CopyPlan, copy_blocks, copy_grid
from kernels.testing import guarded, is_poison, mutant, poisoned, traffic_meter

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.float64,
]
NUM_BLOCKS = 10
# Chains, a cycle with a tail, a fan-out and a copy onto itself, beside an independent pair.
OVERLAPPING = [(0, 1), (1, 2), (2, 0), (2, 3), (4, 4), (5, 6), (6, 7), (8, 9)]


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits: for floats this includes NaNs with every payload."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return raw.to(torch.uint8).view(dtype).to(DEVICE)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaNs compare too."""
    return tensor.contiguous().view(torch.uint8)


def in_layout(layout: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int):
    """(key view, value view) of random bits, [num_blocks, block_size, heads, head_size]."""
    n, b, h, d = shape
    if layout == "nhd":
        key, value = (random_bits(*shape, dtype=dtype, seed=seed + i) for i in (0, 1))
        return key, value
    if layout == "hnd":
        key, value = (random_bits(n, h, b, d, dtype=dtype, seed=seed + i) for i in (0, 1))
        return key.transpose(1, 2), value.transpose(1, 2)
    if layout == "interleaved":
        both = random_bits(n, 2, b, h, d, dtype=dtype, seed=seed)
        return both[:, 0], both[:, 1]
    if layout == "interleaved-slots":
        both = random_bits(n, b, 2, h, d, dtype=dtype, seed=seed)
        return both[:, :, 0], both[:, :, 1]
    assert layout == "interleaved-heads"
    both = random_bits(n, b, h, 2 * d, dtype=dtype, seed=seed)
    return both[..., :d], both[..., d:]


def check_copies(
    copies: ModuleType = module,
    layout: str = "nhd",
    shape: tuple[int, ...] = (NUM_BLOCKS, 4, 2, 16),
    dtype: torch.dtype = torch.float16,
    mapping: list[tuple[int, int]] = OVERLAPPING,
    num_layers: int = 2,
) -> None:
    """Copy, and compare every block of every layer, named as a destination or not."""
    layers = [in_layout(layout, shape, dtype, seed=10 * i) for i in range(num_layers)]
    keys, values = ([pair[i] for pair in layers] for i in (0, 1))
    wanted = [cache.clone() for cache in (*keys, *values)]
    reference.copy_blocks(wanted[:num_layers], wanted[num_layers:], mapping)
    copies.copy_blocks(keys, values, mapping)
    for got, want in zip((*keys, *values), wanted, strict=True):
        assert torch.equal(bits(got), bits(want))


@pytest.mark.gpu_first
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied_bit_for_bit(dtype: torch.dtype) -> None:
    """D04: NaN payloads survive, also those of dtypes that the interpreter can't compute with."""
    check_copies(dtype=dtype)


@pytest.mark.parametrize(
    "layout", ["nhd", "hnd", "interleaved", "interleaved-slots", "interleaved-heads"]
)
@pytest.mark.parametrize(
    "shape",
    [(10, 1, 1, 16), (10, 3, 5, 7), (10, 12, 1, 80), (10, 48, 2, 96)],
    ids=lambda shape: "bs{1}-h{2}-d{3}".format(*shape),
)
def test_every_layout_is_addressed_by_its_strides(layout: str, shape: tuple[int, ...]) -> None:
    check_copies(layout=layout, shape=shape, num_layers=1)


@pytest.mark.parametrize("block_size", [128, 544])
def test_a_block_of_many_tiles(block_size: int) -> None:
    """B09: the tile isn't the block, so no block is too large."""
    check_copies(shape=(4, block_size, 1, 64), mapping=[(3, 0), (0, 2)], num_layers=1)


@pytest.mark.parametrize(
    "mapping",
    [[], [(2, 2)], [(0, 1)], [(0, 1), (0, 2), (0, 3)], [(0, 1), (1, 0)], [(3, 2), (2, 1), (1, 0)]],
    ids=["empty", "self", "one", "fan-out", "swap", "chain"],
)
def test_all_sources_are_read_before_any_destination_is_written(mapping) -> None:
    """Design rule: overlapping sources and destinations behave as if all sources came first."""
    check_copies(mapping=mapping)


@pytest.mark.gpu_first
def test_overlapping_permutations_of_random_order() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        destinations = rng.permutation(NUM_BLOCKS)[: rng.integers(1, NUM_BLOCKS + 1)]
        sources = rng.integers(0, NUM_BLOCKS, len(destinations))
        mapping = list(zip(sources.tolist(), destinations.tolist(), strict=True))
        check_copies(shape=(NUM_BLOCKS, 2, 1, 8), mapping=mapping, num_layers=1)


def test_keys_and_values_may_differ_in_head_size() -> None:
    key = random_bits(4, 4, 1, 48, dtype=torch.float16)
    value = random_bits(4, 4, 1, 32, dtype=torch.float16)
    want_key, want_value = key[2].clone(), value[2].clone()
    copy_blocks([key], [value], [(2, 3)])
    assert torch.equal(bits(key[3]), bits(want_key))
    assert torch.equal(bits(value[3]), bits(want_value))


def test_nothing_outside_the_cache_is_written() -> None:
    key, value = (guarded(3, 5, 1, 7, dtype=torch.float16, device=DEVICE) for _ in range(2))
    key.tensor[2] = value.tensor[2] = 1.5
    copy_blocks([key.tensor], [value.tensor], [(2, 0)])
    for cache in (key, value):
        cache.assert_guards_intact()
        assert (cache.tensor[[0, 2]] == 1.5).all()
        assert is_poison(cache.tensor[1]).all()


@pytest.mark.parametrize("kind", ["list", "numpy", "tensor", "int32"])
def test_the_mapping_may_come_as(kind: str) -> None:
    pairs = [(0, 1), (2, 3)]
    mapping = {
        "list": pairs,
        "numpy": np.array(pairs),
        "tensor": torch.tensor(pairs),
        "int32": torch.tensor(pairs, dtype=torch.int32),
    }[kind]
    check_copies(mapping=mapping)


BAD_MAPPINGS = {
    "source-negative": ([(0, 1), (-1, 2)], r"source -1 is outside \[0, 10\)"),
    "source-too-large": ([(10, 2)], r"source 10 is outside \[0, 10\)"),
    "destination-negative": ([(0, -7)], r"destination -7 is outside \[0, 10\)"),
    "destination-too-large": ([(0, 99)], r"destination 99 is outside \[0, 10\)"),
    "destination-twice": ([(0, 3), (1, 4), (2, 3)], "destination 3 occurs 2 times"),
    "three-columns": ([(0, 1, 2)], r"shape \[1, 3\]"),
    "one-axis": ([1, 2], r"shape \[2\]"),
    "floats": (torch.tensor([[0.0, 1.0]]), "float32"),
    "bools": (torch.tensor([[True, False]]), "bool"),
}


@pytest.mark.parametrize("case", BAD_MAPPINGS)
def test_a_bad_mapping_is_refused_before_anything_moves(case: str) -> None:
    """D04: an id out of range must be reported, not turned into an address."""
    mapping, message = BAD_MAPPINGS[case]
    key, value = (random_bits(NUM_BLOCKS, 2, 1, 8, dtype=torch.float16) for _ in range(2))
    before = bits(key).clone(), bits(value).clone()
    with pytest.raises(ValueError, match=message):
        copy_blocks([key], [value], mapping)
    assert torch.equal(bits(key), before[0])
    assert torch.equal(bits(value), before[1])


def test_caches_that_do_not_belong_together_are_refused() -> None:
    """D04: keys and values are checked for themselves, shape, dtype and device."""

    def cache(*shape: int, dtype: torch.dtype = torch.float16, device: str = DEVICE):
        return torch.zeros(*shape, dtype=dtype, device=device)

    good, pool = cache(4, 2, 1, 8), cache(5, 2, 1, 8)
    bad = {
        "2 key caches, but 1 value": ([good, good], [good]),
        "holds no tensor": ([], []),
        r"shape \[4, 2, 8\]": ([cache(4, 2, 8)], [good]),
        r"value_caches have shape \[4, 3, 1\]": ([good], [cache(4, 3, 1, 8)]),
        r"key_caches\[1\] has shape": ([good, cache(5, 2, 1, 8)], [good, good]),
        "value_caches have dtype torch.float32": ([good], [cache(4, 2, 1, 8, dtype=torch.float32)]),
        r"value_caches\[1\] has dtype": ([good] * 2, [good, cache(4, 2, 1, 8, dtype=torch.int8)]),
        "value_caches have device meta": ([good], [cache(4, 2, 1, 8, device="meta")]),
        "the last one must be 1": ([cache(4, 2, 1, 16)[..., ::2]], [good]),
        "elements overlap": ([cache(1, 2, 1, 8).expand(4, 2, 1, 8)], [good]),
        r"strides \(8, 8, 8, 1\): elements": (
            [cache(64).as_strided((4, 2, 1, 8), (8, 8, 8, 1))],
            [good],
        ),
        r"key_caches\[0\] and value_caches\[0\] share memory": ([pool[:4]], [pool[1:]]),
        r"key_caches\[0\] and key_caches\[1\] share memory": (
            [pool[:4], pool.view(-1)[8:72].view(4, 2, 1, 8)],
            [good, good.clone()],
        ),
        r"key_caches\[0\] and value_caches\[1\] share memory": (
            [pool[:4], good],
            [good, pool.as_strided((4, 2, 1, 8), (8, 32, 8, 1))],
        ),
    }
    for message, (keys, values) in bad.items():
        with pytest.raises(ValueError, match=message):
            copy_blocks(keys, values, [(0, 1)])


def test_shared_memory_is_found_as_by_counting_bytes() -> None:
    """Two random windows into one buffer, of the same strides: every byte's owner is compared."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        n, b, h, d = rng.integers(1, 4, 4).tolist()
        axes = rng.permutation(3)
        strides, reach = [0, 0, 0, 1], d + int(rng.integers(0, 3))
        for axis in axes:
            strides[axis] = reach
            reach = reach * (n, b, h)[axis] + int(rng.integers(0, 3))
        buffer = torch.zeros(2 * reach + 8, dtype=torch.int16)
        offset = int(rng.integers(0, reach + 4))
        sizes = (n, b, h, int(rng.integers(1, d + 1)))
        windows = [
            buffer.as_strided((n, b, h, d), strides),
            buffer.as_strided(sizes, strides, offset),
        ]
        owners = torch.full((2, len(buffer)), -1)
        for owner, window in zip(owners, windows, strict=True):
            start = owner.storage_offset() + window.storage_offset()
            blocks = owner.as_strided(window.shape, strides, start)
            blocks.copy_(torch.arange(n).view(n, 1, 1, 1).expand(window.shape))
        common = (owners >= 0).all(0)
        any_shared = bool(common.any())
        mixed = bool((common & (owners[0] != owners[1])).any())
        for shared, check in (
            (any_shared, lambda w: module.check_apart("a", w[:1], "b", w[1:])),
            (mixed, lambda w: module.check_blocks_apart("ab", w)),
        ):
            if shared:
                with pytest.raises(ValueError, match="share memory"):
                    check(windows)
            else:
                check(windows)
        seen.add((any_shared, mixed))
    assert len(seen) == 3


@pytest.mark.parametrize("same", ["caches", "view"])
def test_values_may_be_a_view_of_the_keys(same: str) -> None:
    key = random_bits(6, 3, 1, 16, dtype=torch.float16)
    want = key.clone()
    reference.copy_blocks([want], [], [(0, 1), (1, 2)])
    copy_blocks([key], [key if same == "caches" else key[..., :8]], [(0, 1), (1, 2)])
    assert torch.equal(bits(key), bits(want))


@pytest.mark.skipif(DEVICE != "cpu", reason="the meter needs the interpreter")
@pytest.mark.parametrize("layout", ["nhd", "hnd", "interleaved-slots"])
@pytest.mark.parametrize("head_size", [64, 80, 7])
def test_a_copy_moves_twice_the_block_bytes(layout: str, head_size: int) -> None:
    key, value = in_layout(layout, (6, 12, 2, head_size), torch.float16, seed=0)
    moved = 3 * (12 * 2 * head_size) * 2 * 2
    # Interleaved keys and values share an address range, so both are metered as one tensor.
    caches = {"key": key, "value": value} if layout != "interleaved-slots" else {"both": key._base}
    with traffic_meter(**caches) as traffic:
        copy_blocks([key], [value], [(0, 1), (2, 3), (0, 5)])
    assert sum(traffic.read.values()) == moved
    assert sum(traffic.written.values()) == moved
    assert traffic.other_written == 0


def huge_cache(num_blocks: int, block_words: int) -> torch.Tensor:
    """int8 [num_blocks, 1, 1, block_words] inside untouched memory, 2^31 elements on either side.

    Whatever an int32 offset wraps to still lies in the mapping, so a wrong address is a wrong
    result and not a crash.
    """
    margin = 1 << 31
    size = num_blocks * block_words + 2 * margin
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    storage = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.int8)
    return storage[margin : size - margin].view(num_blocks, 1, 1, block_words)


def check_far_blocks(copies: ModuleType) -> None:
    # 2^31 + 2^20 elements; an odd size makes the kernel's word one byte, so offsets are elements.
    block_words = 4095
    num_blocks = ((1 << 31) + (1 << 20)) // block_words
    key, value = huge_cache(num_blocks, block_words), huge_cache(num_blocks, block_words)
    last = num_blocks - 1
    key[last], value[last] = 3, 4
    copies.copy_blocks([key], [value], [(last, 1), (0, last - 1), (last, last - 2)])
    for cache, content in ((key, 3), (value, 4)):
        assert (cache[[1, last, last - 2]] == content).all()
        assert (cache[[0, last - 1]] == 0).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="untouched host memory costs nothing; a GPU's does")
def test_blocks_beyond_2_31_elements() -> None:
    """Block ids meet their stride as int64."""
    check_far_blocks(module)


MUTATIONS = {
    "mask-dropped": (
        "mask = word < block_units * UNIT_WORDS",
        "mask = word < tl.cdiv(block_units * UNIT_WORDS, TILE_WORDS) * TILE_WORDS",
    ),
    "last-tile-skipped": (
        "cdiv(block_words, tile_words),)",
        "max(1, block_words // tile_words),)",
    ),
    "last-word-skipped": (
        "mask = word < block_units * UNIT_WORDS",
        "mask = word < block_units * UNIT_WORDS - 1",
    ),
    "heads-and-tokens-swapped": (
        "src_word = (token * stride_src_token + head * stride_src_head)",
        "src_word = (token * stride_src_head + head * stride_src_token)",
    ),
    "keys-only": (
        "caches = [*key_caches, *value_caches]",
        "caches = [*key_caches]",
    ),
    "not-staged": ("if not overwritten.any():", "if True:"),
    "pair-reversed": (
        "src_block = tl.load(pairs + 2 * pair)",
        "src_block = tl.load(pairs + 2 * pair + 1)",
    ),
    "one-layer": ("num_tiles % num_tensors", "num_tiles % 1"),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="a mutant may write outside its tensors")
@pytest.mark.parametrize("name", MUTATIONS)
def test_these_tests_catch(name: str) -> None:
    """A fault in the kernel's source turns the checks above red."""

    def check(copies: ModuleType) -> None:
        # A block of two and a half tiles, its successors poisoned. It comes first, because a mutant
        # that writes too far does so inside these tensors.
        key, value = (poisoned(4, 160, 1, 64, dtype=torch.float16) for _ in range(2))
        key[0], value[0] = 1.0, 2.0
        copies.copy_blocks([key], [value], [(0, 1)])
        assert (key[1] == 1.0).all()
        assert (value[1] == 2.0).all()
        assert is_poison(key[2:]).all()
        assert is_poison(value[2:]).all()
        check_copies(copies)
        check_copies(copies, layout="interleaved-slots", shape=(NUM_BLOCKS, 12, 2, 80))

    check(module)
    with mutant(module, *MUTATIONS[name]) as copies, pytest.raises(AssertionError):
        check(copies)


@pytest.mark.skipif(DEVICE != "cpu", reason="a mutant may write outside its tensors")
def test_these_tests_catch_int32_addresses() -> None:
    old = "src += src_block * stride_src_block * UNIT_WORDS"
    new = "src += src_block.to(tl.int32) * stride_src_block * UNIT_WORDS"
    with mutant(module, old, new) as copies, pytest.raises(AssertionError):
        check_far_blocks(copies)


def test_the_grid_grows_on_its_first_axis_only() -> None:
    """B14: 70,000 pairs are no problem on axis 0."""
    assert copy_grid(70_000, 64, block_words=8192, tile_words=2048) == (70_000 * 64 * 4,)


COUNT_COMPILATIONS = """
import torch
from kernels.copy_blocks import copy_blocks
from kernels.launch import TARGETS, record_launches
from kernels.offline import compile_key

keys = set()
with record_launches(TARGETS["sm_90"]) as launches:
    for num_blocks in (40, 64, 3000):
        for num_layers in (1, 16, 17):
            caches = [torch.empty(num_blocks, 16, 2, 64) for _ in range(num_layers)]
            for num_pairs in (1, 2, 16, 17, 33):
                copy_blocks(caches, caches, [(0, i + 1) for i in range(num_pairs)])
assert len(launches) == 45
print(len({compile_key(launch, TARGETS["sm_90"]) for launch in launches}))
"""


def test_new_sizes_never_recompile() -> None:
    """B17: one compilation serves every number of pairs, layers and blocks."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COUNT_COMPILATIONS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.gpu
def test_70_000_pairs() -> None:
    """B14: they run, too."""
    key = random_bits(140_000, 1, 1, 16, dtype=torch.float16)
    value = random_bits(140_000, 1, 1, 16, dtype=torch.float16)
    ids = torch.randperm(140_000)
    copy_blocks([key], [value], ids.view(-1, 2))
    source, destination = ids.view(-1, 2).to(DEVICE).unbind(1)
    for cache in (key, value):
        assert torch.equal(bits(cache[source]), bits(cache[destination]))


@pytest.mark.gpu
def test_the_mapping_is_not_reused_while_a_copy_is_in_flight() -> None:
    """D03: a thousand copies are queued at once; each has pairs of its own."""
    key = torch.zeros(1001, 16, 8, 128, dtype=torch.float16, device=DEVICE)
    value = torch.zeros_like(key)
    key[0], value[0] = 1.0, 2.0
    mapping = np.zeros((1, 2), dtype=np.int64)
    for i in range(1000):
        mapping[:] = (i, i + 1)
        copy_blocks([key], [value], mapping)
        mapping[:] = 0
    assert (key == 1.0).all()
    assert (value == 2.0).all()


def test_a_plan_changes_the_layout_on_the_way() -> None:
    hnd, _ = in_layout("hnd", (4, 6, 2, 24), torch.float16, seed=0)
    nhd = poisoned(4, 6, 2, 24, dtype=torch.float16, device=DEVICE)
    CopyPlan([hnd], [nhd]).run(np.array([(0, 3), (2, 1)]))
    assert torch.equal(bits(nhd[[3, 1]]), bits(hnd[[0, 2]]))
    assert is_poison(nhd[[0, 2]]).all()


def test_a_table_of_addresses_is_made_once_and_the_oldest_given_up() -> None:
    tables = AddressTables(max_tables=2)
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    first = tables.get((16, 32), device)
    assert first.tolist() == [16, 32]
    assert tables.get((32, 16), device).tolist() == [32, 16]
    assert tables.get((16, 32), device) is first
    tables.get((48,), device)
    assert tables.get((16, 32), device) is first
    tables.get((64,), device)
    tables.get((80,), device)
    assert tables.get((16, 32), device) is not first


def test_a_capture_needs_tables_made_before_and_keeps_them(monkeypatch) -> None:
    tables = AddressTables(max_tables=1)
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    made = tables.get((16, 32), device)
    with monkeypatch.context() as patch:
        patch.setattr(module, "is_capturing", lambda device: True)
        assert tables.get((16, 32), device) is made
        with pytest.raises(RuntimeError, match="before capturing"):
            tables.get((48,), device)
    for address in (48, 64, 80):
        tables.get((address,), device)
    assert tables.get((16, 32), device) is made


@pytest.mark.gpu
def test_a_second_stream_need_not_wait_for_the_first_one_s_table() -> None:
    """Both copy within the same new caches; the first stream is busy all the while."""
    key = torch.arange(4.0, device=DEVICE).view(4, 1, 1, 1).repeat(1, 16, 8, 64)
    value = key + 10
    copy_blocks([key.clone()], [value.clone()], [(0, 1)])  # so that nothing is compiled below
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(2_000_000_000)
        copy_blocks([key], [value], [(0, 1)])
        assert not first.query()
    with torch.cuda.stream(second):
        copy_blocks([key], [value], [(2, 3)])
    second.synchronize()
    assert not first.query()
    torch.cuda.synchronize()
    assert key[:, 0, 0, 0].tolist() == [0, 0, 2, 2]
    assert value[:, 0, 0, 0].tolist() == [10, 10, 12, 12]


@pytest.mark.gpu
def test_a_captured_copy_outlives_its_table_s_turn() -> None:
    key = torch.arange(4.0, device=DEVICE).view(4, 1, 1, 1).repeat(1, 16, 8, 64)
    plan, pairs = CopyPlan([key], [key]), torch.tensor([(0, 1)], device=DEVICE)
    new = CopyPlan([key.clone()], [key.clone()])
    plan.run(torch.tensor([(3, 3)], device=DEVICE))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(pairs)
        with pytest.raises(RuntimeError, match="before capturing"):
            new.run(pairs)
        with pytest.raises(RuntimeError, match="during graph capture"):
            plan.run(np.array([(0, 1)]))
    for address in range(300):
        module.address_tables.get((address,), key.device)
    graph.replay()
    assert key[:, 0, 0, 0].tolist() == [0, 0, 2, 3]
