"""Writing new keys and values into the paged cache by slot mapping."""

import pytest
import torch

from kernels import launch, reference
from kernels.testing import is_poison, poisoned, traffic_meter
from kernels.write_kv import write_kv

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def new_tokens(num_tokens: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> list:
    shape = (num_tokens, num_kv_heads, head_size)
    return [torch.randn(shape).to(dtype).to(DEVICE) for _ in range(2)]


def caches(*shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [poisoned(*shape, dtype=dtype, device=DEVICE) for _ in range(2)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_kv_heads", "head_size", "block_size"),
    [(1, 16, 1), (2, 80, 16), (8, 128, 12), (5, 96, 8), (1, 576, 48), (64, 192, 16), (3, 5, 544)],
)
def test_copies_exactly(num_kv_heads: int, head_size: int, block_size: int, dtype: str) -> None:
    """Every slot that is named holds its token bit for bit; every other one is untouched."""
    key, value = new_tokens(9, num_kv_heads, head_size, DTYPES[dtype])
    num_blocks = 40 // block_size + 2
    slots = torch.randperm(num_blocks * block_size)[:9].to(DEVICE)
    slots[4] = -1
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    written, expected = caches(*shape, dtype=key.dtype), caches(*shape, dtype=key.dtype)
    write_kv(key, value, *written, slots)
    reference.write_kv(key, value, *expected, slots)
    for got, want in zip(written, expected, strict=True):
        assert same_bits(got, want)
        assert int((~is_poison(got)).sum()) == 8 * num_kv_heads * head_size


def test_slot_minus_one_writes_nothing() -> None:
    """B13: -1 // block_size and -1 % block_size named the last slot of the cache."""
    key, value = new_tokens(3, 2, 16, torch.float32)
    for operation in (write_kv, reference.write_kv):
        key_cache, value_cache = caches(10, 8, 2, 16, dtype=torch.float32)
        operation(key, value, key_cache, value_cache, torch.tensor([5, -1, 7], device=DEVICE))
        for cache, source in ((key_cache, key), (value_cache, value)):
            flat = cache.view(80, 2, 16)
            assert torch.equal(flat[[5, 7]], source[[0, 2]])
            assert is_poison(flat[[*range(5), 6, *range(8, 80)]]).all()


def test_slots_past_the_cache_write_nothing() -> None:
    key, value = new_tokens(3, 2, 16, torch.float32)
    storage = poisoned(12, 8, 2, 16, dtype=torch.float32, device=DEVICE)
    slots = torch.tensor([80, 2**40, 3], device=DEVICE)
    write_kv(key, value, storage[:10], storage[:10].clone(), slots)
    assert int((~is_poison(storage)).sum()) == 2 * 16
    assert torch.equal(storage[0, 3], key[2])


@pytest.mark.gpu_first
@pytest.mark.parametrize(
    "cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_stores_the_scaled_value(dtype: str, cache_dtype: torch.dtype) -> None:
    """Rounded to nearest after division, and cut to the largest finite value."""
    key, value = new_tokens(5, 2, 64, DTYPES[dtype])
    key[0] *= 1e6 if dtype != "fp16" else 1e4
    per_head = torch.tensor([0.5, 4.0], device=DEVICE)
    slots = torch.tensor([0, 9, 17, 3, 30], device=DEVICE)
    written, expected = (
        caches(2, 16, 2, 64, dtype=cache_dtype),
        caches(2, 16, 2, 64, dtype=cache_dtype),
    )
    write_kv(key, value, *written, slots, k_scale=2.0, v_scale=per_head)
    reference.write_kv(key, value, *expected, slots, k_scale=2.0, v_scale=per_head)
    for got, want in zip(written, expected, strict=True):
        assert same_bits(got, want)
    assert written[0].view(32, 2, 64)[0].float().isfinite().all()


@pytest.mark.gpu_first
@pytest.mark.parametrize(
    "cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"]
)
def test_fp8_keeps_nan(cache_dtype: torch.dtype) -> None:
    """A GPU's minimum and maximum drop NaN, so a faulty key became a large finite one."""
    key, value = new_tokens(2, 2, 16, torch.bfloat16)
    key[0, 0, 3] = value[1, 1, 5] = float("nan")
    key_cache, value_cache = caches(1, 2, 2, 16, dtype=cache_dtype)
    write_kv(key, value, key_cache, value_cache, torch.tensor([0, 1], device=DEVICE))
    for source, cache in ((key, key_cache), (value, value_cache)):
        assert torch.equal(cache[0].float().isnan(), source.isnan())


def test_strided_caches_and_rows() -> None:
    """Keys and values cut out of one packed row, a cache that interleaves K and V, and one HND."""
    packed = torch.randn(6, 4, 48, device=DEVICE)
    key, value = packed[..., :16], packed[..., 32:]
    both = poisoned(3, 2, 8, 4, 16, dtype=torch.float32, device=DEVICE)
    hnd = poisoned(3, 4, 8, 16, dtype=torch.float32, device=DEVICE).permute(0, 2, 1, 3)
    slots = torch.tensor([23, 0, 8, 7, -1, 13], device=DEVICE)
    write_kv(key, value, both[:, 0], hnd, slots)
    kept = slots >= 0
    assert torch.equal(both[:, 0].reshape(24, 4, 16)[slots[kept]], key[kept])
    assert torch.equal(hnd.reshape(24, 4, 16)[slots[kept]], value[kept])
    assert is_poison(both[:, 1]).all()


def test_offsets_past_two_billion_elements() -> None:
    """Block ids become int64 before they meet a stride; the pages between stay untouched."""
    key, value = new_tokens(2, 1, 16, torch.float16)
    storage = torch.empty(2**31 + 4096, dtype=torch.float16, device=DEVICE)
    cache = torch.as_strided(storage, (9, 4, 1, 16), (2**28, 16, 16, 1), 0)
    write_kv(
        key,
        value,
        cache,
        cache.as_strided(cache.shape, cache.stride(), 2048),
        torch.tensor([33, 2], device=DEVICE),
    )
    assert torch.equal(cache[8, 1], key[0])
    assert torch.equal(storage[2048 + 2 * 16 : 2048 + 3 * 16], value[1, 0])


@pytest.mark.skipif(HAS_GPU, reason="the traffic meter needs the interpreter")
def test_moves_each_byte_once() -> None:
    key, value = new_tokens(5, 3, 80, torch.float16)
    key_cache, value_cache = caches(4, 16, 3, 80, dtype=torch.float16)
    slots = torch.tensor([3, 17, -1, 40, 63])
    with traffic_meter(key=key, value=value, kc=key_cache, vc=value_cache, slots=slots) as traffic:
        write_kv(key, value, key_cache, value_cache, slots)
    moved = 4 * 3 * 80 * 2
    assert traffic.read == {"key": moved, "value": moved, "kc": 0, "vc": 0, "slots": 5 * 8}
    assert traffic.written == {"key": 0, "value": 0, "kc": moved, "vc": moved, "slots": 0}
    assert traffic.other_read == traffic.other_written == 0


def test_only_the_first_axis_grows() -> None:
    """B14: tokens on the grid's second axis end at 65,535."""
    key = torch.zeros(1, 2, 16).expand(70_000, -1, -1)
    cache = torch.zeros(1, 4, 2, 16)
    with launch.record_launches(launch.TARGETS["sm_90"]) as launches:
        write_kv(key, key, cache, cache.clone(), torch.full((70_000,), -1))
    assert launches[0].grid == (70_000, 1)


def empty_heads(num_kv_heads: int, head_size: int) -> dict[str, torch.Tensor]:
    key = torch.zeros(3, num_kv_heads, head_size)
    cache = torch.zeros(2, 8, num_kv_heads, head_size)
    return {"key": key, "value": key, "key_cache": cache, "value_cache": cache}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.zeros(3, 16)}, "key has shape"),
        ({"key": torch.zeros(3, 2, 16, dtype=torch.int32)}, "key is int32"),
        ({"value": torch.zeros(3, 2, 8)}, "value has shape"),
        ({"value": torch.zeros(3, 2, 16, dtype=torch.float16)}, "value is float16"),
        ({"key_cache": torch.zeros(2, 8, 1, 16)}, "key_cache has shape"),
        ({"key_cache": torch.zeros(2, 8, 2, 16, dtype=torch.float16)}, "key_cache is float16"),
        ({"key_cache": torch.zeros(2, 8, 16, 2).transpose(2, 3)}, "last one must be 1"),
        ({"value_cache": torch.zeros(3, 8, 2, 16)}, "value_cache has shape"),
        ({"value_cache": torch.zeros(2, 8, 2, 16, device="meta")}, "is on meta"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping is int32"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "slot_mapping has shape"),
        ({"k_scale": 0.5}, "for fp8 caches"),
        ({"k_scale": -1.0, "fp8": True}, "k_scale is -1.0"),
        ({"k_scale": float("inf"), "fp8": True}, "k_scale is inf"),
        (dict.fromkeys(("key_cache", "value_cache"), torch.zeros(2, 8, 2, 16)), "same address"),
        (dict.fromkeys(("key_cache", "value_cache"), torch.zeros(2, 0, 2, 16)), "block_size is 0"),
        ({"value_cache": torch.zeros(8, 2, 16).expand(2, -1, -1, -1)}, "value_cache has strides"),
        ({"key_cache": torch.zeros(8, 2, 16).expand(2, -1, -1, -1)}, "key_cache has strides"),
        (empty_heads(0, 16), "num_kv_heads is 0"),
        (empty_heads(2, 0), "head_size is 0"),
        ({"v_scale": torch.ones(3), "fp8": True}, "v_scale is"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)  # fmt: skip
def test_refuses_before_launching(changes: dict, message: str) -> None:
    arguments = {
        "key": torch.zeros(3, 2, 16),
        "value": torch.zeros(3, 2, 16),
        "key_cache": torch.zeros(2, 8, 2, 16),
        "value_cache": torch.zeros(2, 8, 2, 16),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
    } | changes
    if arguments.pop("fp8", False):
        for name in ("key_cache", "value_cache"):
            arguments[name] = arguments[name].to(torch.float8_e5m2)
    with (
        launch.record_launches(launch.TARGETS["sm_90"]) as launches,
        pytest.raises(ValueError, match=message),
    ):
        write_kv(**arguments)
    assert launches == []
