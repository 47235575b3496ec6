"""The serving simulation: nothing is lost, nothing hangs, and hit rates agree with known values."""

import dataclasses
import gzip
import itertools
import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from experiments.config import ServeConfig, register, to_serve_config
from experiments.metrics import SimulationResult
from experiments.requests import Request, Segment, Workload
from experiments.roofline import Roofline
from experiments.simulator import Simulator, simulate
from experiments.workloads import make_workload

ROOT = Path(__file__).resolve().parent.parent
MOONCAKE = ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
BASE = (
    "workload=no_sharing",
    "cache.block_size=4",
    "cache.num_gpu_blocks=64",
    "cache.num_cpu_blocks=64",
    "cache.watermark=0",
)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


def configure(*overrides: str) -> ServeConfig:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return to_serve_config(compose("serve", overrides=[*BASE, *overrides]))


class Listed(Workload):
    """Requests given one by one."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__("listed", len(requests))
        self.requests = requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def run_checked(workload: Workload, config: ServeConfig) -> SimulationResult:
    """Simulate with `check_integrity` after every step, and see that nothing is left behind."""
    simulator = Simulator(workload, config)
    original = simulator._step

    def step() -> None:
        original()
        simulator.manager.check_integrity()
        seats = sum(len(job.samples) for job in simulator._running)
        assert seats + simulator._num_seats == config.scheduler.max_num_seqs

    simulator._step = step
    result = simulator.run()
    occupancy = simulator.manager.get_gpu_occupancy()
    assert occupancy.num_in_use == 0
    assert (
        simulator.manager.get_num_free_cpu_blocks()
        == simulator.manager.allocator.allocator(1).get_num_total_blocks()
    )
    assert sorted(simulator._slots._free) == list(range(config.scheduler.max_num_seqs))
    metrics = result.metrics
    assert metrics["requests_finished"] + metrics["requests_refused"] == workload.num_requests
    return result


def num_output_tokens(result: SimulationResult) -> int:
    return round(result.metrics["output_tokens_per_s"] * result.metrics["simulated_s"])


CROWDED = ("workload.num_requests=40", "workload.request_rate_per_s=50")


@pytest.mark.parametrize("caching", ["true", "false"])
@pytest.mark.parametrize("chunked", ["true", "false"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("samples", ["[1]", "[1,3]"])
@pytest.mark.parametrize("evictor", ["lru", "fifo"])
def test_a_crowded_pool_serves_everything(
    caching: str, chunked: str, preemption: str, samples: str, evictor: str
) -> None:
    config = configure(
        *CROWDED,
        "workload.prompt_tokens_mean=40",
        "workload.output_tokens_mean=30",
        f"workload.sample_counts={samples}",
        f"cache.enable_caching={caching}",
        f"evictor={evictor}",
        f"scheduler.chunked_prefill={chunked}",
        f"scheduler.preemption={preemption}",
        "scheduler.max_num_seqs=16",
        "scheduler.max_num_batched_tokens=48",
    )
    workload = make_workload(config.workload, config.seed)
    result = run_checked(workload, config)
    metrics = result.metrics
    assert metrics[f"preemptions_{preemption}"] > 0
    assert metrics["peak_pool_use"] > 0.9
    assert (metrics["swapped_out_blocks"] > 0) == (preemption == "swap")
    assert (metrics["copied_blocks"] > 0) == (samples == "[1,3]")
    if metrics["requests_refused"] == 0:
        expected = sum(r.num_output_tokens * r.num_samples for r in workload)
        assert num_output_tokens(result) == expected


def test_a_sliding_window_serves_everything_in_fewer_blocks() -> None:
    overrides = (
        *CROWDED,
        "workload.prompt_tokens_mean=20",
        "workload.output_tokens_mean=60",
        "cache.enable_caching=false",
        "cache.num_gpu_blocks=4000",
    )
    full = run_checked(make_workload(configure(*overrides).workload, 0), configure(*overrides))
    config = configure(*overrides, "cache.sliding_window=16")
    windowed = run_checked(make_workload(config.workload, 0), config)
    assert windowed.metrics["peak_pool_use"] < 0.7 * full.metrics["peak_pool_use"]
    assert num_output_tokens(windowed) == num_output_tokens(full)


def test_swap_falls_back_on_recompute_without_room_on_the_cpu() -> None:
    config = configure(
        *CROWDED,
        "workload.prompt_tokens_mean=40",
        "workload.output_tokens_mean=30",
        "cache.num_cpu_blocks=4",
        "scheduler.preemption=swap",
    )
    metrics = run_checked(make_workload(config.workload, 0), config).metrics
    assert metrics["preemptions_recompute"] > 0


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_output_tokens", "num_samples", "refused"),
    [
        (256, 1, 1, 0),  # 64 blocks exactly
        (257, 1, 1, 1),
        (200, 57, 1, 0),  # the last output token is never written
        (200, 58, 1, 1),
        (128, 10, 12, 0),  # 32 blocks shared, 3 own ones a sample would be 68 with 12
        (128, 10, 13, 1),
        (4, 4, 17, 1),  # more samples than max_num_seqs
    ],
)
def test_what_can_never_fit_is_refused_and_counted(
    num_prompt_tokens: int, num_output_tokens: int, num_samples: int, refused: int
) -> None:
    """A10: a request that can never fit must not wait for ever and block those behind it."""
    if num_samples == 12:
        num_output_tokens = 8  # 2 blocks of its own for each sample: 32 + 24
    config = configure("scheduler.max_num_seqs=16")
    requests = [
        Request(0, 0.0, num_prompt_tokens, num_output_tokens, num_samples),
        Request(1, 0.0, 8, 8),
    ]
    metrics = run_checked(Listed(requests), config).metrics
    assert metrics["requests_refused"] == refused
    assert metrics["requests_finished"] == 2 - refused


def test_the_watermark_refuses_what_it_would_refuse_in_an_empty_pool() -> None:
    config = configure("cache.watermark=0.25")
    requests = [Request(0, 0.0, 193, 1), Request(1, 0.0, 192, 1), Request(2, 0.0, 192, 60)]
    metrics = run_checked(Listed(requests), config).metrics
    assert (metrics["requests_refused"], metrics["requests_finished"]) == (1, 2)


def test_a_grown_request_comes_back_past_the_watermark() -> None:
    """Preempted with more tokens than the watermark would admit, it runs once it is alone."""
    config = configure("cache.watermark=0.5", "cache.enable_caching=false")
    requests = [Request(i, 0.0, 64, 180) for i in range(2)]
    metrics = run_checked(Listed(requests), config).metrics
    assert metrics["preemptions_recompute"] > 0
    assert metrics["requests_finished"] == 2


def test_timing_of_a_single_request() -> None:
    """One prefill and n - 1 decode steps, each as long as the roofline says."""
    config = configure("cache.enable_caching=false", "scheduler.max_num_batched_tokens=256")
    result = run_checked(Listed([Request(0, 2.0, 100, 4)]), config)
    clock = Roofline(config)

    def step(query: int, context: int) -> float:
        return clock.step_seconds(np.array([query]), np.array([context]))

    ttft = step(100, 100)
    decode = [step(1, 101), step(1, 102), step(1, 103)]
    metrics = result.metrics
    assert metrics["ttft_p50_s"] == pytest.approx(ttft)
    assert metrics["tpot_p50_s"] == pytest.approx(sum(decode) / 3)
    assert metrics["e2e_latency_p50_s"] == pytest.approx(ttft + sum(decode))
    assert metrics["simulated_s"] == pytest.approx(2.0 + ttft + sum(decode))
    assert metrics["output_tokens_per_s"] == pytest.approx(4 / metrics["simulated_s"])
    assert metrics["total_tokens_per_s"] == pytest.approx(104 / metrics["simulated_s"])
    # 25, then 26 blocks of 4 slots; 0, then 3, 2 and 1 of them empty.
    waste = (decode[0] * 3 + decode[1] * 2 + decode[2] * 1) / 104
    assert metrics["mean_partial_block_waste"] == pytest.approx(waste / (ttft + sum(decode)))
    in_use = (25 * ttft + 26 * sum(decode)) / 64
    assert metrics["mean_pool_use"] == pytest.approx(in_use / (ttft + sum(decode)))
    assert metrics["peak_pool_use"] == 26 / 64


def test_chunks_keep_to_the_budget() -> None:
    config = configure("cache.enable_caching=false", "scheduler.max_num_batched_tokens=256")
    config.scheduler.max_num_batched_tokens = 30
    result = run_checked(Listed([Request(0, 0.0, 100, 1)]), config)
    clock = Roofline(config)
    ends = [(30, 30), (30, 60), (30, 90), (10, 100)]
    expected = sum(clock.step_seconds(np.array([q]), np.array([c])) for q, c in ends)
    assert result.metrics["ttft_p50_s"] == pytest.approx(expected)


def test_cached_tokens_are_skipped_and_only_once_computed() -> None:
    """A03: requests of one step don't skip what none has computed yet; a later one does."""
    shared = (Segment(7, 40),)
    requests = [
        Request(0, 0.0, 40, 1, segments=shared),
        Request(1, 0.0, 40, 1, segments=shared),
        Request(2, 9.0, 40, 1, segments=shared),
        Request(3, 9.0, 40, 1, segments=shared, extra_key=("tenant", "b")),
    ]
    metrics = run_checked(Listed(requests), configure()).metrics
    # 10 blocks a prompt; the last token is always computed, and so its block.
    assert metrics["token_hit_rate"] == 36 / 160
    assert metrics["block_hit_rate"] == 9 / 40


def test_equal_runs_give_equal_results() -> None:
    def metrics() -> dict[str, float]:
        config = configure(*CROWDED, "workload.prompt_tokens_mean=40")
        result = simulate(make_workload(config.workload, config.seed), config).metrics
        return {name: value for name, value in result.items() if "wall" not in name}

    assert metrics() == metrics()


def test_a_larger_watermark_preempts_less() -> None:
    def preemptions(watermark: float) -> int:
        config = configure(
            "workload.num_requests=80",
            "workload.request_rate_per_s=50",
            "workload.prompt_tokens_mean=40",
            "workload.output_tokens_mean=30",
            f"cache.watermark={watermark}",
        )
        metrics = simulate(make_workload(config.workload, config.seed), config).metrics
        return metrics["preemptions_recompute"]

    assert preemptions(0) > preemptions(0.1) > preemptions(0.4)


class OneOutputToken(Workload):
    """A workload whose requests end with their first token: only prompts are cached."""

    def __init__(self, inner: Workload) -> None:
        super().__init__(inner.name, inner.num_requests)
        self.inner = inner

    def __iter__(self) -> Iterator[Request]:
        for request in self.inner:
            yield dataclasses.replace(request, num_output_tokens=1)


def serve_one_at_a_time(num_gpu_blocks: int) -> SimulationResult:
    """Mooncake prompts, one request at a time, in blocks of 512 tokens as in the trace."""
    config = configure(
        "workload=mooncake",
        f"workload.path={MOONCAKE}",
        "cache.block_size=512",
        f"cache.num_gpu_blocks={num_gpu_blocks}",
        "cache.num_cpu_blocks=0",
        "scheduler.max_num_seqs=1",
        "scheduler.max_num_batched_tokens=200000",
        "scheduler.ignore_arrivals=true",
    )
    result = simulate(OneOutputToken(make_workload(config.workload, config.seed)), config)
    assert result.metrics["requests_finished"] == 12_031
    return result


def block_hit_rate_of_a_plain_pool(num_blocks: int) -> float:
    """The same replay with an ordered dict of ids: LRU, tails first, partial blocks never kept."""
    kept: OrderedDict[int, None] = OrderedDict()
    num_free, num_hits, num_ids = num_blocks, 0, 0
    with gzip.open(MOONCAKE, "rt") as lines:
        for record in map(json.loads, lines):
            ids = record["hash_ids"]
            full = ids[: record["input_length"] // 512]
            hits = list(itertools.takewhile(kept.__contains__, full))
            num_hits += min(len(hits), (record["input_length"] - 1) // 512)
            num_ids += len(ids)
            cached = [i for i in full if i in kept]
            for i in cached:
                del kept[i]
            for _ in range(len(ids) - len(cached)):
                if num_free:
                    num_free -= 1
                else:
                    kept.popitem(last=False)
            num_free += len(ids) - len(full)
            kept.update(dict.fromkeys(reversed(full)))
    return num_hits / num_ids


needs_mooncake = pytest.mark.skipif(
    not MOONCAKE.exists(), reason="needs ../shared/traces/mooncake_conversation.jsonl.gz"
)


@needs_mooncake
def test_unbounded_hit_rates_on_a_real_trace_agree_with_known_values() -> None:
    """Published with the trace: 0.3660 of blocks and 0.3734 of tokens, for an unbounded pool."""
    metrics = serve_one_at_a_time(200_000).metrics
    assert metrics["evicted_blocks"] == 0
    assert metrics["block_hit_rate"] == pytest.approx(0.3660, abs=0.0001)
    assert metrics["token_hit_rate"] == pytest.approx(0.3734, abs=0.0001)


@needs_mooncake
def test_hit_rate_of_a_small_pool_on_a_real_trace_is_that_of_a_plain_model() -> None:
    metrics = serve_one_at_a_time(10_000).metrics
    assert metrics["block_hit_rate"] == block_hit_rate_of_a_plain_pool(10_000)
