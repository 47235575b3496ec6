"""The clock: architecture sums against published figures, times against hand calculation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from experiments.config import ServeConfig, register, to_serve_config
from experiments.ranges import ConfigError
from experiments.roofline import (
    Roofline,
    kv_bytes_per_token,
    num_parameters,
    pool_size,
    tensor_parallel,
)

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")


def serve_config(*overrides: str) -> ServeConfig:
    register()
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        return to_serve_config(compose("serve", overrides=list(overrides)))


@pytest.fixture(scope="module")
def llama_8b_on_h100() -> ServeConfig:
    return serve_config("model=llama3_8b", "gpu=h100")


@pytest.mark.parametrize(
    ("model", "parameters", "kv_bytes"),
    [
        ("llama3_8b", 8_030_261_248, 131_072),
        ("llama3_70b", 70_553_706_496, 327_680),
        ("qwen3_32b", 32_762_123_264, 262_144),
    ],
)
def test_sizes_agree_with_the_model_cards(model: str, parameters: int, kv_bytes: int) -> None:
    config = serve_config(f"model={model}")
    assert num_parameters(config.model) == parameters
    assert kv_bytes_per_token(config.model) == kv_bytes


@pytest.mark.parametrize(
    ("model", "gpu", "degree"),
    [
        ("llama3_8b", "rtx4090", 1),
        ("llama3_70b", "h100", 4),
        ("llama3_70b", "h200", 2),
        ("llama3_70b", "mi300x", 1),
        ("qwen3_32b", "h100", 2),
        ("qwen3_32b", "a100_80g", 2),
    ],
)
def test_automatic_tensor_parallelism(model: str, gpu: str, degree: int) -> None:
    config = serve_config(f"model={model}", f"gpu={gpu}")
    assert tensor_parallel(config.model, config.gpu) == degree


def test_tensor_parallelism_that_cannot_be(llama_8b_on_h100: ServeConfig) -> None:
    model, gpu = llama_8b_on_h100.model, llama_8b_on_h100.gpu
    with pytest.raises(ConfigError, match=r"gpu\.tensor_parallel=3: expected a divisor"):
        tensor_parallel(model, replace(gpu, tensor_parallel=3))
    with pytest.raises(ConfigError, match=r"8 of them can't hold the 16\.1 GB"):
        tensor_parallel(model, replace(gpu, memory_bytes=4e9))


def test_automatic_pools_hold_what_the_memory_leaves(llama_8b_on_h100: ServeConfig) -> None:
    """80 GB x 0.9 less 1.5 GB reserved and 16.06 GB weights, over blocks of 2 MiB."""
    usable = 80e9 * 0.9 - 1.5e9 - 2 * 8_030_261_248
    assert pool_size(llama_8b_on_h100) == (int(usable // 2**21), int(4e9 // 2**21))
    cache = replace(llama_8b_on_h100.cache, block_size=64, num_cpu_blocks=7)
    assert pool_size(replace(llama_8b_on_h100, cache=cache)) == (int(usable // 2**23), 7)


def test_a_pool_without_room_for_a_block_is_refused(llama_8b_on_h100: ServeConfig) -> None:
    gpu = replace(llama_8b_on_h100.gpu, memory_bytes=19e9, tensor_parallel=1)
    with pytest.raises(ConfigError, match=r"cache\.num_gpu_blocks=auto: 1 x h100 leave"):
        pool_size(replace(llama_8b_on_h100, gpu=gpu))


def test_a_decode_step_is_bound_by_memory(llama_8b_on_h100: ServeConfig) -> None:
    """One token each of 64 sequences: weights less input embedding, their KV, and the overhead."""
    query, context = np.ones(64, np.int64), np.full(64, 1000)
    weights = 2 * (8_030_261_248 - 128_256 * 4096)
    moved = weights + 131_072 * 64 * (1000 + 1)
    expected = moved / (3.35e12 * 0.8) + 0.002
    assert Roofline(llama_8b_on_h100).step_seconds(query, context) == pytest.approx(expected)


def test_a_prefill_is_bound_by_arithmetic(llama_8b_on_h100: ServeConfig) -> None:
    """4,096 new tokens after 1,000 cached ones, each attending itself and all before it."""
    new, cached = 4096, 1000
    body = 8_030_261_248 - 2 * 128_256 * 4096
    pairs = sum(cached + position + 1 for position in range(new))
    flops = 2 * body * new + 2 * 128_256 * 4096 + 4 * 32 * 4096 * pairs
    seconds = Roofline(llama_8b_on_h100).step_seconds(np.array([new]), np.array([cached + new]))
    assert seconds == pytest.approx(flops / (989.5e12 * 0.6) + 0.002)


def test_a_window_limits_pairs_and_reads(llama_8b_on_h100: ServeConfig) -> None:
    """A window as long as the context changes nothing; a short one is counted pair by pair."""
    query, context = np.array([1, 40, 3000]), np.array([5000, 60, 3000])
    plain = Roofline(llama_8b_on_h100).step_seconds(query, context)

    def windowed(window: int) -> float:
        cache = replace(llama_8b_on_h100.cache, sliding_window=window, enable_caching=False)
        return Roofline(replace(llama_8b_on_h100, cache=cache)).step_seconds(query, context)

    assert windowed(5000) == pytest.approx(plain)
    pairs = sum(
        min(position + 1, 100)
        for q, c in zip(query, context, strict=True)
        for position in range(c - q, c)
    )
    body = 8_030_261_248 - 2 * 128_256 * 4096
    flops = 2 * body * 3041 + 3 * 2 * 128_256 * 4096 + 4 * 32 * 4096 * pairs
    assert windowed(100) == pytest.approx(flops / (989.5e12 * 0.6) + 0.002)


def test_sharded_steps_pay_for_all_reduces() -> None:
    """On two GPUs: half the time of one, and two ring all-reduces a layer over the link."""
    one = serve_config("model=qwen3_32b", "gpu=h200", "gpu.step_overhead_s=0")
    two = replace(one, gpu=replace(one.gpu, tensor_parallel=2))
    query = np.array([2048])
    reduced = 2 * 64 * 2048 * 5120 * 2 / (450e9 * 0.8)
    expected = Roofline(one).step_seconds(query, query) / 2 + reduced
    assert Roofline(two).step_seconds(query, query) == pytest.approx(expected)


def test_an_empty_step_costs_the_overhead(llama_8b_on_h100: ServeConfig) -> None:
    empty = np.array([], dtype=np.int64)
    assert Roofline(llama_8b_on_h100).step_seconds(empty, empty) == 0.002


def test_swapping_takes_what_pcie_allows(llama_8b_on_h100: ServeConfig) -> None:
    expected = 100 * 2**21 / (64e9 * 0.8)
    assert Roofline(llama_8b_on_h100).swap_seconds(100) == pytest.approx(expected)
