"""gather_blocks, scatter_blocks and swap_blocks: blocks leave a cache and come back bit-equal."""

from types import ModuleType

import numpy as np
import pytest
import torch

import kernels.gather_blocks as module
from kernels import reference
from kernels.gather_blocks import gather_blocks, scatter_blocks, swap_blocks
from kernels.testing import is_poison, mutant, poisoned, traffic_meter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES, torch.float8_e4m3fn, torch.float8_e5m2]
LAYOUTS = ["nhd", "hnd", "interleaved-slots"]


def random_cache(layout: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0):
    """[num_blocks, block_size, heads, head_size] of random bits, NaNs of all payloads included."""
    n, b, h, d = shape
    stored = {"nhd": (n, b, h, d), "hnd": (n, h, b, d), "interleaved-slots": (n, b, 2, h, d)}
    size = torch.empty(0, dtype=dtype).element_size()
    *outer, last = stored[layout]
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*outer, last * size), generator=generator).to(torch.uint8)
    cache = raw.view(dtype).to(DEVICE)
    if layout == "hnd":
        return cache.transpose(1, 2)
    return cache[:, :, 1] if layout == "interleaved-slots" else cache


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaNs compare too."""
    return tensor.contiguous().view(torch.uint8)


def check_round_trip(
    blocks_module: ModuleType = module,
    layout: str = "nhd",
    shape: tuple[int, ...] = (9, 4, 2, 16),
    dtype: torch.dtype = torch.float16,
) -> None:
    """Gather from two layers, scatter into two fresh caches, compare both with the reference."""
    caches = [random_cache(layout, shape, dtype, seed) for seed in range(2)]
    ids = [7, 0, 8, 3]
    out = [poisoned(4, *shape[1:], dtype=dtype, device=DEVICE) for _ in caches]
    returned = blocks_module.gather_blocks(caches, torch.tensor(ids), out)
    for got, own, want in zip(out, returned, reference.gather_blocks(caches, ids), strict=True):
        assert own is got
        assert torch.equal(bits(got), bits(want))
    targets = [random_cache(layout, shape, dtype, seed + 5) for seed in range(2)]
    wanted = [target.clone() for target in targets]
    reference.scatter_blocks(out, wanted, [1, 8, 0, 5])
    blocks_module.scatter_blocks(out, targets, np.array([1, 8, 0, 5]))
    for got, want in zip(targets, wanted, strict=True):
        assert torch.equal(bits(got), bits(want))
    smaller = [random_cache("nhd", (3, *shape[1:]), dtype, seed + 9) for seed in range(2)]
    wanted = [cache.clone() for cache in smaller]
    reference.swap_blocks(targets, wanted, [(5, 1), (8, 2)])
    blocks_module.swap_blocks(targets, smaller, [(5, 1), (8, 2)])
    for got, want in zip(smaller, wanted, strict=True):
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_trip_is_bit_equal(dtype: torch.dtype) -> None:
    """D04: NaN payloads included."""
    check_round_trip(dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [(9, 1, 1, 16), (9, 3, 5, 7), (9, 12, 2, 80), (9, 16, 8, 64)],
    ids=lambda shape: "bs{1}-h{2}-d{3}".format(*shape),
)
def test_every_layout_is_gathered_in_token_order(layout: str, shape: tuple[int, ...]) -> None:
    check_round_trip(layout=layout, shape=shape)


@pytest.mark.parametrize("block_size", [48, 128, 544])
def test_a_block_of_many_tiles(block_size: int) -> None:
    check_round_trip(layout="hnd", shape=(9, block_size, 1, 16))


def test_an_id_may_be_gathered_twice_and_none_at_all() -> None:
    cache = random_cache("nhd", (5, 2, 1, 8), torch.float32)
    (twice,) = gather_blocks([cache], [3, 3, 0])
    assert torch.equal(bits(twice), bits(cache[[3, 3, 0]]))
    (none,) = gather_blocks([cache], [])
    assert none.shape == (0, 2, 1, 8)
    before = bits(cache).clone()
    scatter_blocks([none], [cache], [])
    assert torch.equal(bits(cache), before)


def test_blocks_that_are_not_named_stay_untouched() -> None:
    cache = poisoned(6, 3, 1, 5, dtype=torch.float16, device=DEVICE)
    blocks = torch.randn(2, 3, 1, 5, device=DEVICE).half()
    scatter_blocks([blocks], [cache], [4, 1])
    assert torch.equal(cache[[4, 1]], blocks)
    assert is_poison(cache[[0, 2, 3, 5]]).all()


def bad_calls() -> dict[str, tuple]:
    """Message -> (function, arguments): each must raise before anything is written."""
    cache = torch.randn(5, 2, 1, 8, device=DEVICE)
    blocks = torch.randn(2, 2, 1, 8, device=DEVICE)
    half = blocks.half()
    pool = torch.randn(9, 2, 2, 8, device=DEVICE)
    return {
        r"destinations\[0\] and sources\[0\] share memory": (
            swap_blocks,
            [cache],
            [cache],
            [(0, 1), (1, 2), (2, 3)],
        ),
        r"destinations\[1\] and sources\[0\] share memory": (
            swap_blocks,
            [pool[:5], torch.empty_like(pool)[:5]],
            [torch.empty_like(pool)[4:], pool[4:]],
            [(0, 1)],
        ),
        r"out\[0\] and caches\[0\] share memory": (gather_blocks, [cache], [1, 0], [cache[:2]]),
        r"out\[0\] and caches\[1\] share memory": (
            gather_blocks,
            [torch.empty_like(cache), cache],
            [1, 0],
            [cache[3:], torch.empty_like(blocks)],
        ),
        r"blocks\[0\] and caches\[0\] share memory": (
            scatter_blocks,
            [cache[1:3]],
            [cache],
            [4, 2],
        ),
        r"block_ids 5 is outside \[0, 5\)": (gather_blocks, [cache], [0, 5]),
        r"block_ids -1 is outside \[0, 5\)": (gather_blocks, [cache], [-1]),
        r"block_ids has shape \[1, 2\]": (gather_blocks, [cache], [[0, 1]]),
        "block_ids is float64": (gather_blocks, [cache], [0.0, 1.0]),
        "caches holds no tensor": (gather_blocks, [], [0]),
        "out have 2 blocks for 3 block ids": (gather_blocks, [cache], [0, 1, 2], [blocks]),
        "out are torch.float16, caches torch.float32": (gather_blocks, [cache], [0, 1], [half]),
        "out holds 2 tensors, caches 1": (gather_blocks, [cache], [0, 1], [blocks, blocks]),
        r"out have blocks of shape \[1, 2, 8\]": (
            gather_blocks,
            [cache],
            [0, 1],
            [blocks.transpose(1, 2)],
        ),
        "block_ids 3 occurs 2 times": (scatter_blocks, [blocks], [cache], [3, 3]),
        r"block_ids 9 is outside \[0, 5\)": (scatter_blocks, [blocks], [cache], [3, 9]),
        "blocks have 2 blocks for 1 block ids": (scatter_blocks, [blocks], [cache], [3]),
        "blocks are torch.float16": (scatter_blocks, [half], [cache], [0, 1]),
        r"source 5 is outside \[0, 5\)": (swap_blocks, [cache], [blocks], [(5, 0)]),
        r"destination 2 is outside \[0, 2\)": (swap_blocks, [cache], [blocks], [(0, 2)]),
        "destination 1 occurs 2 times": (swap_blocks, [cache], [blocks], [(0, 1), (3, 1)]),
        "destinations are torch.float16": (swap_blocks, [cache], [half], [(0, 1)]),
        "destinations holds 1 tensors, sources 2": (
            swap_blocks,
            [cache, cache],
            [blocks],
            [(0, 1)],
        ),
    }


@pytest.mark.parametrize("message", bad_calls())
def test_a_bad_call_is_refused_before_anything_moves(message: str) -> None:
    """D04: wrong sizes, ids and dtypes are reported with their value."""
    function, *arguments = bad_calls()[message]
    tensors = [t for ts in arguments for t in ts if isinstance(t, torch.Tensor)]
    before = [bits(tensor).clone() for tensor in tensors]
    with pytest.raises(ValueError, match=message):
        function(*arguments)
    for tensor, content in zip(tensors, before, strict=True):
        assert torch.equal(bits(tensor), content)


def test_parts_of_one_pool_may_be_swapped() -> None:
    """Other blocks, or other heads of the same blocks, are other memory."""
    pool = random_cache("nhd", (9, 3, 2, 8), torch.float16)
    before = pool.clone()
    swap_blocks([pool[:5]], [pool[5:]], [(4, 0), (1, 3)])
    assert torch.equal(bits(pool[[5, 8]]), bits(before[[4, 1]]))
    swap_blocks([pool[:, :, :1]], [pool[:, :, 1:]], [(0, 1), (1, 2)])
    assert torch.equal(bits(pool[1:3, :, 1]), bits(before[:2, :, 0]))


@pytest.mark.skipif(DEVICE != "cpu", reason="the meter needs the interpreter")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_and_scatter_move_twice_the_block_bytes(layout: str) -> None:
    cache = random_cache(layout, (6, 12, 2, 80), torch.float16)
    out = poisoned(3, 12, 2, 80, dtype=torch.float16)
    with traffic_meter(cache=cache, out=out) as traffic:
        gather_blocks([cache], [5, 0, 2], [out])
    assert traffic.read == {"cache": out.nbytes, "out": 0}
    assert traffic.written == {"cache": 0, "out": out.nbytes}
    with traffic_meter(cache=cache, out=out) as traffic:
        scatter_blocks([out], [cache], [5, 0, 2])
    assert traffic.read == {"cache": 0, "out": out.nbytes}
    assert traffic.written == {"cache": out.nbytes, "out": 0}
    assert traffic.other_written == 0


MUTATIONS = {
    "gather-reversed": (
        "CopyPlan(caches, out).run(np.stack([ids, np.arange(len(ids))], axis=1))",
        "CopyPlan(caches, out).run(np.stack([ids, np.arange(len(ids))[::-1]], axis=1))",
    ),
    "scatter-drops-one": (
        "CopyPlan(blocks, caches).run(np.stack([np.arange(len(ids)), ids], axis=1))",
        "CopyPlan(blocks, caches).run(np.stack([np.arange(len(ids)), ids], axis=1)[1:])",
    ),
    "swap-first-layer-only": (
        "CopyPlan(sources, destinations).run(pairs)",
        "CopyPlan(sources[:1], destinations[:1]).run(pairs)",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_these_tests_catch(name: str) -> None:
    """A fault in a launcher turns the round trip red; the kernel's own: copy_blocks' tests."""
    with mutant(module, *MUTATIONS[name]) as blocks_module, pytest.raises(AssertionError):
        check_round_trip(blocks_module)


@pytest.mark.gpu
def test_pinned_memory_is_read_and_written_in_place() -> None:
    cache = torch.randn(64, 16, 8, 128, device=DEVICE)
    host = torch.empty(4, 16, 8, 128, pin_memory=True)
    gather_blocks([cache], [63, 0, 5, 7], [host])
    torch.cuda.synchronize()
    assert torch.equal(host, cache[[63, 0, 5, 7]].cpu())
    target = torch.zeros_like(cache)
    scatter_blocks([host], [target], [1, 2, 3, 4])
    assert torch.equal(target[1:5].cpu(), host)


@pytest.mark.gpu
def test_pageable_host_memory_is_refused() -> None:
    cache = torch.zeros(4, 2, 1, 8, device=DEVICE)
    with pytest.raises(ValueError, match="pinned"):
        swap_blocks([cache], [torch.zeros(4, 2, 1, 8)], [(0, 1)])


@pytest.mark.gpu
def test_a_swap_on_a_side_stream_takes_the_old_data() -> None:
    """D03: the block is overwritten as soon as the swap was queued, a thousand times."""
    cache = torch.zeros(2, 16, 8, 128, device=DEVICE)
    host = torch.zeros(1000, 16, 8, 128, pin_memory=True)
    side = torch.cuda.Stream()
    for i in range(1000):
        cache[0].fill_(i)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            swap_blocks([cache], [host], [(0, i)])
        torch.cuda.current_stream().wait_stream(side)
        cache[0].fill_(-1)
    torch.cuda.synchronize()
    assert torch.equal(host[:, 0, 0, 0], torch.arange(1000.0))
    assert (host == host[:, :1, :1, :1]).all()
