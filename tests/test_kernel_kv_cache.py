"""KVCache: layouts, and a step's copies and swaps in every combination that a step may hold."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import kernels.kv_cache as module
from cache.block_manager import BlockSpaceManager
from cache.sequence import Sequence, SequenceGroup, SequenceStatus
from kernels.kv_cache import KVCache
from kernels.testing import mutant

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = [("NHD", False), ("HND", False), ("NHD", True), ("HND", True)]


def make_cache(
    kv_module: ModuleType = module,
    layout: str = "NHD",
    interleaved: bool = False,
    dtype: torch.dtype = torch.float16,
    num_blocks: int = 8,
    num_host_blocks: int = 6,
) -> KVCache:
    """Two layers whose blocks all hold random bits."""
    kv = kv_module.KVCache(
        2,
        num_blocks,
        4,
        2,
        16,
        dtype,
        DEVICE,
        layout=layout,
        interleaved=interleaved,
        num_host_blocks=num_host_blocks,
    )
    generator = torch.Generator().manual_seed(0)
    for cache in all_caches(kv):
        integers = cache.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
        low, high = torch.iinfo(integers.dtype).min, torch.iinfo(integers.dtype).max
        integers.copy_(torch.randint(low, high + 1, integers.shape, generator=generator))
    return kv


def all_caches(kv: KVCache) -> list[torch.Tensor]:
    return [*kv.key_caches, *kv.value_caches, *kv.host_key_caches, *kv.host_value_caches]


def block_bits(cache: torch.Tensor) -> list[bytes]:
    """The bytes of each block."""
    flat = cache.contiguous().view(torch.uint8).cpu().numpy()
    return [block.tobytes() for block in flat]


def check_step(kv: KVCache, copies=(), swap_out=(), swap_in=()) -> None:
    """Apply a step and compare every block with a list-of-blocks model of the same rules."""
    caches = all_caches(kv)
    half = len(caches) // 2
    before = [block_bits(cache) for cache in caches]
    after = [list(blocks) for blocks in before]
    for i in range(half):
        for source, destination in swap_out:
            after[half + i][destination] = before[i][source]
        for source, destination in swap_in:
            after[i][destination] = before[half + i][source]
        swapped = list(after[i])
        for source, destination in copies:
            after[i][destination] = swapped[source]
    kv.apply(copies=copies, swap_out=swap_out, swap_in=swap_in)
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    for cache, want in zip(caches, after, strict=True):
        assert block_bits(cache) == want


STEPS = {
    "nothing": {},
    "copies": {"copies": [(0, 1), (1, 2), (3, 4)]},
    "swaps": {"swap_out": [(0, 1), (5, 0)], "swap_in": [(4, 6), (5, 7)]},
    "copy-of-a-block-swapped-in": {"swap_in": [(2, 3)], "copies": [(3, 5), (3, 6)]},
    "copy-into-a-block-swapped-out": {"swap_out": [(3, 2)], "copies": [(5, 3)]},
    "swap-into-a-block-swapped-out": {"swap_out": [(3, 2)], "swap_in": [(4, 3)]},
    "host-block-leaves-and-is-taken": {"swap_out": [(3, 2)], "swap_in": [(2, 5)]},
    "two-blocks-change-places": {"swap_out": [(3, 2), (1, 0)], "swap_in": [(2, 3), (4, 1)]},
    "one-block-to-two": {"swap_out": [(3, 2), (3, 4)], "swap_in": [(0, 5), (0, 6)]},
    "all-at-once": {
        "swap_out": [(0, 0), (1, 1)],
        "swap_in": [(0, 1), (5, 0)],
        "copies": [(1, 2), (2, 3), (0, 7)],
    },
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_reads_before_it_writes(step: str) -> None:
    """D02: what is swapped in and copied in one step is copied after it came in."""
    check_step(make_cache(), **STEPS[step])


@pytest.mark.parametrize(("layout", "interleaved"), LAYOUTS)
def test_every_layout(layout: str, interleaved: bool) -> None:
    kv = make_cache(layout=layout, interleaved=interleaved)
    for cache in (*kv.key_caches, *kv.value_caches):
        assert cache.shape == (8, 4, 2, 16)
        assert cache.stride(1) == (16 if layout == "HND" else 32)
        assert cache.stride(0) == (256 if interleaved else 128)
    assert kv.num_bytes == 2 * 2 * 8 * 4 * 2 * 16 * 2
    check_step(kv, **STEPS["all-at-once"])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_every_dtype_moves_bit_for_bit(dtype: torch.dtype) -> None:
    """D04: random bits hold NaNs with every payload."""
    check_step(make_cache(dtype=dtype), **STEPS["all-at-once"])


def test_a_round_trip_through_the_host_is_bit_equal() -> None:
    kv = make_cache()
    before = [block_bits(cache) for cache in (*kv.key_caches, *kv.value_caches)]
    kv.apply(swap_out=[(i, 5 - i) for i in range(6)])
    for cache in (*kv.key_caches, *kv.value_caches):
        cache.zero_()
    kv.apply(swap_in=[(5 - i, i) for i in range(6)])
    for cache, blocks in zip((*kv.key_caches, *kv.value_caches), before, strict=True):
        assert block_bits(cache)[:6] == blocks[:6]


def test_values_may_have_another_head_size() -> None:
    kv = KVCache(1, 4, 2, 1, 24, device=DEVICE, num_host_blocks=2, value_head_size=8)
    kv.key_caches[0][1], kv.value_caches[0][1] = 1.0, 2.0
    kv.apply(copies=[(1, 3)], swap_out=[(1, 0)])
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    assert kv.key_caches[0].shape == (4, 2, 1, 24)
    for caches, content in ((kv.key_caches, 1.0), (kv.value_caches, 2.0)):
        assert (caches[0][3] == content).all()
    assert (kv.host_key_caches[0][0] == 1.0).all()
    assert (kv.host_value_caches[0][0] == 2.0).all()


BAD_STEPS = {
    "destination of copies and swap_in 3 occurs 2 times": {
        "copies": [(0, 3)],
        "swap_in": [(1, 3)],
    },
    "swap_out destination 2 occurs 2 times": {"swap_out": [(0, 2), (1, 2)]},
    "swap_in destination 4 occurs 2 times": {"swap_in": [(0, 4), (1, 4)]},
    "copies destination 4 occurs 2 times": {"copies": [(0, 4), (1, 4)]},
    r"copies source 8 is outside \[0, 8\)": {"copies": [(8, 1)]},
    r"swap_out source -1 is outside \[0, 8\)": {"swap_out": [(-1, 1)]},
    r"swap_out destination 6 is outside \[0, 6\)": {"swap_out": [(1, 6)]},
    r"swap_in source 7 is outside \[0, 6\)": {"swap_in": [(7, 1)]},
    r"swap_in destination 8 is outside \[0, 8\)": {"swap_in": [(1, 8)]},
    r"swap_in has shape \[1, 3\]": {"swap_in": [(1, 2, 3)]},
    "swap_out is float64": {"swap_out": [(1.0, 2.0)]},
}


@pytest.mark.parametrize("message", BAD_STEPS)
def test_a_bad_step_is_refused_before_anything_moves(message: str) -> None:
    """D02, D04: the step's lists are validated together; good ones beside a bad one don't run."""
    kv = make_cache()
    before = [block_bits(cache) for cache in all_caches(kv)]
    step = {"copies": [(6, 7)], "swap_out": [(6, 5)], **BAD_STEPS[message]}
    with pytest.raises(ValueError, match=message):
        kv.apply(**step)
    assert [block_bits(cache) for cache in all_caches(kv)] == before


def test_bad_sizes_are_refused() -> None:
    good = {"num_layers": 1, "num_blocks": 4, "block_size": 4, "num_kv_heads": 1, "head_size": 8}
    for name in good:
        with pytest.raises(ValueError, match=f"{name} is 0"):
            KVCache(**{**good, name: 0})
    for options, message in (
        ({"num_host_blocks": -1}, "num_host_blocks is -1"),
        ({"layout": "DNH"}, "layout is 'DNH'"),
        ({"value_head_size": -8}, "value_head_size is -8"),
        ({"value_head_size": 4, "interleaved": True}, "value_head_size is 4 and head_size 8"),
    ):
        with pytest.raises(ValueError, match=message):
            KVCache(**good, **options)
    with pytest.raises(ValueError, match=r"outside \[0, 0\)"):
        KVCache(**good).apply(swap_out=[(0, 0)])


MUTATIONS = {
    "copies-before-swaps": (
        "        self._apply_swaps(swap_out, swap_in)\n        copy_within(self._within, copies)\n",
        "        copy_within(self._within, copies)\n        self._apply_swaps(swap_out, swap_in)\n",
    ),
    "host-not-staged": ("if taken.any():", "taken[:] = False\n        if taken.any():"),
    "keys-only-swapped": (
        "self._to_host = CopyPlan(self._caches, self._host_caches)",
        "self._to_host = CopyPlan(self.key_caches, self.host_key_caches)",
    ),
    "swap-in-before-swap-out": (
        "        self._to_host.run(swap_out)\n        self._from_host.run(swap_in[~taken])\n",
        "        self._from_host.run(swap_in[~taken])\n        self._to_host.run(swap_out)\n",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_these_tests_catch(name: str) -> None:
    """A fault in the order or extent of a step's transfers turns a step above red."""
    with mutant(module, *MUTATIONS[name]) as kv_module, pytest.raises(AssertionError):
        _check_all_steps(kv_module)


def _check_all_steps(kv_module: ModuleType) -> None:
    for step in STEPS.values():
        check_step(make_cache(kv_module), **step)


class Driver:
    """A block manager and the cache it decides for; KV says which token stands where."""

    def __init__(self, enable_caching: bool) -> None:
        self.manager = BlockSpaceManager(4, 8, 8, watermark=0, enable_caching=enable_caching)
        self.kv = KVCache(1, 8, 4, 1, 2, torch.float32, DEVICE, num_host_blocks=8)

    def write(self, seq: Sequence, start: int) -> None:
        """Compute the KV of a sequence's tokens from `start` on: (token, position)."""
        slots = torch.from_numpy(self.manager.get_slot_mapping(seq, start, seq.num_tokens))
        for cache in (self.kv.key_caches[0], self.kv.value_caches[0]):
            cache.view(-1, 2)[slots.to(DEVICE)] = self.expected(seq, start)
        seq.num_computed_tokens = seq.num_tokens

    def expected(self, seq: Sequence, start: int = 0) -> torch.Tensor:
        tokens = torch.from_numpy(seq.token_ids[start:].copy())
        positions = torch.arange(start, seq.num_tokens)
        return torch.stack([tokens, positions], dim=1).float().to(DEVICE)

    def step(self, seq: Sequence, token: int) -> None:
        """One decode step: append, copy what the manager says, write."""
        start = seq.num_tokens
        seq.append_token_ids([token])
        self.kv.apply(copies=self.manager.append_slots(seq))
        self.write(seq, start)

    def check(self, *seqs: Sequence) -> None:
        for seq in seqs:
            table = torch.from_numpy(self.manager.get_block_table(seq)).long().to(DEVICE)
            for cache in (self.kv.key_caches[0], self.kv.value_caches[0]):
                held = cache[table].reshape(-1, 2)[: seq.num_tokens]
                assert torch.equal(held, self.expected(seq))
        self.manager.check_integrity()


@pytest.mark.parametrize("enable_caching", [False, True])
def test_the_block_manager_s_lists_move_the_right_blocks(enable_caching: bool) -> None:
    """A26, D02: fork, copy-on-write, swap out, reuse of the blocks, swap in; every KV is right."""
    driver = Driver(enable_caching)
    parent = Sequence(0, np.arange(10, 20))
    group = SequenceGroup("a", [parent])
    driver.manager.allocate(group)
    parent.status = SequenceStatus.RUNNING
    driver.write(parent, 0)
    child = parent.fork(1)
    group.add(child)
    driver.manager.fork(parent, child)
    for token in (3, 4, 5):
        driver.step(parent, token)
        driver.step(child, token + 1)
        driver.check(parent, child)

    pairs = driver.manager.swap_out(group)
    # Two full blocks are shared by both, and each has two of its own.
    assert len(pairs) == 6
    driver.kv.apply(swap_out=pairs)
    other = Sequence(2, np.arange(100, 124))
    other_group = SequenceGroup("b", [other])
    driver.manager.allocate(other_group)
    other.status = SequenceStatus.RUNNING
    driver.write(other, 0)
    driver.check(other)
    driver.manager.free(other)

    driver.kv.apply(swap_in=driver.manager.swap_in(group))
    driver.check(parent, child)
    driver.step(parent, 7)
    driver.step(child, 8)
    driver.check(parent, child)


WITHOUT_INTERPRETER = """
import numpy as np
import torch
from kernels.copy_blocks import copy_blocks
from kernels.kv_cache import KVCache

kv = KVCache(2, 8, 4, 2, 16, num_host_blocks=6)
for cache in (*kv.key_caches, *kv.value_caches, *kv.host_key_caches, *kv.host_value_caches):
    cache.copy_(torch.arange(len(cache)).view(-1, 1, 1, 1) + (10 if len(cache) == 6 else 0))
kv.apply(copies=[(1, 2), (2, 3)], swap_out=[(0, 0), (1, 1)], swap_in=[(0, 1), (5, 0)])
for cache in (*kv.key_caches, *kv.value_caches):
    assert cache[:, 0, 0, 0].tolist() == [15, 10, 10, 2, 4, 5, 6, 7], cache[:, 0, 0, 0]
for cache in (*kv.host_key_caches, *kv.host_value_caches):
    assert cache[:, 0, 0, 0].tolist() == [0, 1, 12, 13, 14, 15]
try:
    copy_blocks(kv.key_caches, kv.value_caches, [(0, 1)])
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has kernels")
def test_without_gpu_and_interpreter_a_step_is_plain_torch() -> None:
    """C02: an import works anywhere, a launch without a GPU says what to do instead."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WITHOUT_INTERPRETER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "TRITON_INTERPRET=1" in done.stdout
    assert "kernels.reference" in done.stdout


@pytest.mark.gpu
def test_a_swapped_block_may_be_overwritten_at_once() -> None:
    """D03: a thousand times the swap, queued before, takes the old data."""
    kv = KVCache(1, 2, 16, 8, 128, torch.float32, DEVICE, num_host_blocks=1000)
    for i in range(1000):
        kv.key_caches[0][0].fill_(i)
        kv.value_caches[0][0].fill_(-i)
        kv.apply(swap_out=np.array([(0, i)]))
        kv.key_caches[0][0].fill_(0.5)
        kv.value_caches[0][0].fill_(0.5)
    torch.cuda.synchronize()
    for cache, sign in ((kv.host_key_caches[0], 1), (kv.host_value_caches[0], -1)):
        assert torch.equal(cache[:, 0, 0, 0], sign * torch.arange(1000.0))
        assert (cache == cache[:, :1, :1, :1]).all()
