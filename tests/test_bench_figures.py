"""Figures of a measured row: rates, shares of the device's limit, and what can't be right."""

import math

import pytest

from experiments.bench.ceilings import Ceilings
from experiments.bench.config import DecodeConfig, Dtype
from experiments.bench.figures import figures, host_figures
from experiments.bench.offline import predicted_figures, static_figures
from experiments.bench.operations.attention import Attention
from experiments.bench.operations.operation import Cost
from experiments.bench.timing import Timing
from experiments.gpu import GpuConfig
from kernels.offline import Report

# 2 TB/s copied, 2.2 TB/s read, 100 TFLOP/s; 50 and 40 GB/s to and from the host; 2 us a launch.
CEILINGS = Ceilings(2.0e12, 2.2e12, 100e12, 50e9, 40e9, 2e-6)


def timing(p50_s: float) -> Timing:
    return Timing(0.9 * p50_s, p50_s, 1.2 * p50_s, 25, "graph")


def measured(cost: Cost, p50_s: float, l2_bytes: int = 0) -> tuple[dict, str]:
    return figures(cost, timing(p50_s), CEILINGS, l2_bytes)


def test_a_call_that_moves_bytes() -> None:
    """1.1 GB at the 2.2 TB/s of a read take 500 us at least."""
    metrics, suspect = measured(Cost(10**9, 10**8, unit="tokens", num_units=64), 1e-3)
    assert suspect == ""
    assert metrics["p20_us"] == pytest.approx(900)
    assert metrics["p50_us"] == pytest.approx(1000)
    assert metrics["p80_us"] == pytest.approx(1200)
    assert metrics["samples"] == 25
    assert metrics["needed_bytes"] == 11 * 10**8
    assert metrics["achieved_gb_per_s"] == pytest.approx(1100)
    assert metrics["achieved_tflop_per_s"] == 0
    assert metrics["share_of_limit"] == pytest.approx(0.5)
    assert metrics["tokens_per_s"] == pytest.approx(64_000)
    assert metrics["link_gb_per_s"] == pytest.approx(2200)
    assert metrics["copy_gb_per_s"] == pytest.approx(2000)
    assert metrics["launch_bound"] == 0


def test_a_call_that_multiplies() -> None:
    """50 GFLOP at 100 TFLOP/s take 500 us, longer than its bytes do."""
    metrics, suspect = measured(Cost(10**6, 10**6, flops=50 * 10**9), 2e-3)
    assert suspect == ""
    assert metrics["share_of_limit"] == pytest.approx(0.25)
    assert metrics["achieved_tflop_per_s"] == pytest.approx(25)
    assert metrics["intensity"] == pytest.approx(25_000)


@pytest.mark.parametrize(("link", "rate"), [("to_host", 50e9), ("from_host", 40e9)])
def test_a_swap_is_held_against_the_bus(link: str, rate: float) -> None:
    """Each byte crosses it once, although it is read here and written there."""
    metrics, suspect = measured(Cost(10**9, 10**9, link=link), 0.1)
    assert suspect == ""
    assert metrics["achieved_gb_per_s"] == pytest.approx(10)
    assert metrics["link_gb_per_s"] == pytest.approx(rate / 1e9)
    assert metrics["share_of_limit"] == pytest.approx(1e10 / rate)


@pytest.mark.parametrize(
    ("cost", "p50_s", "said"),
    [
        (Cost(10**9, 0), 4e-4, "2500 GB/s is above the measured peak of 2200 GB/s: bytes"),
        (Cost(1, 1, flops=10**9), 9e-6, "111.1 TFLOP/s is above the measured peak of 100 TFLOP/s"),
        (Cost(10**9, 10**9, link="to_host"), 0.019, "52.63 GB/s is above the measured peak of 50"),
    ],
    ids=["bytes", "flops", "bus"],
)
def test_a_rate_above_the_peak_is_an_error_of_counting(cost: Cost, p50_s: float, said: str) -> None:
    """E10: windowed attention was once reported at several times the device's peak."""
    metrics, suspect = measured(cost, p50_s)
    assert said in suspect
    assert metrics["p50_us"] == pytest.approx(p50_s * 1e6), "the figures stay in the row"


def test_ceilings_are_measured_too() -> None:
    """A rate within 5% of the peak is no error."""
    assert measured(Cost(10**9, 0), 1 / (1.04 * 2200))[1] == ""
    assert measured(Cost(10**9, 0), 1 / (1.06 * 2200))[1] != ""


def test_what_was_written_last_may_still_be_in_the_cache() -> None:
    """1 MB read and 3 MB written in 1 us: only with a cache of 2 MB or more may that be."""
    cost = Cost(10**6, 3 * 10**6)
    assert "4000 GB/s" in measured(cost, 1e-6)[1]
    assert "3000 GB/s" in measured(cost, 1e-6, l2_bytes=10**6)[1]
    metrics, suspect = measured(cost, 1e-6, l2_bytes=2 * 10**6)
    assert suspect == ""
    assert metrics["share_of_limit"] == pytest.approx(2 / 2.2), "nor is it held against the limit"
    assert metrics["achieved_gb_per_s"] == pytest.approx(4000)


def test_a_call_that_takes_little_longer_than_a_launch_is_marked() -> None:
    """E10: small kernels measure the cost of launches."""
    assert measured(Cost(1000, 0), 5.9e-6)[0]["launch_bound"] == 1
    assert measured(Cost(1000, 0), 6.1e-6)[0]["launch_bound"] == 0


def test_the_host_has_no_ceilings() -> None:
    metrics = host_figures(Cost(1000, 0, unit="prompts", num_units=4), timing(1e-3))
    assert metrics["prompts_per_s"] == pytest.approx(4000)
    assert "share_of_limit" not in metrics


GPU = GpuConfig(
    name="x",
    target="sm_90",
    flops_per_s=100e12,
    fp32_flops_per_s=10e12,
    memory_bytes=1e9,
    memory_bytes_per_s=1e12,
    pcie_bytes_per_s=1e10,
    link_bytes_per_s=1e10,
)


def test_predictions_come_from_the_data_sheet() -> None:
    cost = Cost(10**6, 10**6, flops=10**9)
    metrics = predicted_figures(cost, 3e6, GPU, Dtype.bf16)
    assert metrics["limit_us"] == pytest.approx(10)
    assert metrics["launch_bound"] == 0
    no_flops = predicted_figures(Cost(10**6, 10**6), 3e6, GPU, Dtype.bf16)
    assert (no_flops["limit_us"], no_flops["predicted_us"]) == pytest.approx((2, 3))
    assert no_flops["launch_bound"] == 1
    assert metrics["predicted_bytes_us"] == pytest.approx(3)
    assert metrics["predicted_flops_us"] == pytest.approx(10)
    assert metrics["predicted_us"] == pytest.approx(10)
    assert predicted_figures(cost, 3e6, GPU, Dtype.fp32)["predicted_us"] == pytest.approx(100)
    swap = Cost(10**6, 10**6, link="from_host")
    assert predicted_figures(swap, 1e6, GPU, Dtype.bf16)["predicted_us"] == pytest.approx(100)


def test_static_figures_are_the_first_kernel_s_but_for_spills() -> None:
    main, merge = (
        Report("k", "", "bf16", "sm_90", "", registers, spilled, shared, instructions_per_token=i)
        for registers, spilled, shared, i in ((200, 0, 4000, 23.0), (40, 16, 9000, None))
    )
    found = static_figures([main, merge])
    assert found["registers"] == 200
    assert found["shared_bytes"] == 4000
    assert found["instructions_per_token"] == 23.0
    assert found["spilled_bytes"] == 16
    assert "instructions_per_token" not in static_figures([merge])


def test_a_window_is_counted_by_what_it_lets_through() -> None:
    """E10: bytes and FLOPs count min(length, window) keys, not the whole context."""
    whole = Attention.cost(DecodeConfig("d", context_len=4096))
    windowed = Attention.cost(DecodeConfig("d", context_len=4096, sliding_window=512))
    wide = Attention.cost(DecodeConfig("d", context_len=4096, sliding_window=10_000))
    assert windowed.flops * 8 == whole.flops == wide.flops
    assert math.isclose(windowed.bytes_read * 8, whole.bytes_read, rel_tol=0.05)
    assert wide == whole
