"""From a cost, a time and the device's ceilings to the figures of a row."""

from .ceilings import Ceilings
from .operations.operation import Cost
from .timing import Timing

TOLERANCE = 1.05
"""How far above a measured peak a rate may lie: ceilings are measured, too."""
LAUNCH_BOUND = 3
"""A call that takes fewer times as long as an empty one says more of launches than of kernels."""


def figures(
    cost: Cost, timing: Timing, ceilings: Ceilings, l2_bytes: int
) -> tuple[dict[str, float | int], str]:
    """(metrics of a row, why they can't be right or nothing).

    The limit is the time that the operation's bytes take at the measured rate of memory (or of the
    bus to the host), or its FLOPs at that of matrix products, whichever is longer. Bytes that may
    still lie in the L2 cache when the call ends, `l2_bytes` of those written, don't count for it.
    """
    link_rate = {
        "memory": ceilings.memory_bytes_per_s,
        "to_host": ceilings.to_host_bytes_per_s,
        "from_host": ceilings.from_host_bytes_per_s,
    }[cost.link]
    moved = _surely_moved(cost, l2_bytes)
    limit_s = max(moved / link_rate, cost.flops / ceilings.matrix_flops_per_s)
    metrics = {
        **host_figures(cost, timing),
        # Bytes and FLOPs counted from the shapes, whatever the implementation really does.
        "achieved_gb_per_s": cost.bytes_moved / timing.p50_s / 1e9,
        "achieved_tflop_per_s": cost.flops / timing.p50_s / 1e12,
        # 1 at the device's limit: the time at its measured rates over the time taken.
        "share_of_limit": limit_s / timing.p50_s,
        "launch_bound": int(timing.p50_s < LAUNCH_BOUND * ceilings.empty_call_s),
        # What the device itself can do, measured in the same process.
        "link_gb_per_s": link_rate / 1e9,
        "copy_gb_per_s": ceilings.copy_bytes_per_s / 1e9,
        "matrix_tflop_per_s": ceilings.matrix_flops_per_s / 1e12,
        "empty_call_us": ceilings.empty_call_s * 1e6,
    }
    return metrics, _suspicion(cost, moved, timing, ceilings, link_rate)


def _surely_moved(cost: Cost, l2_bytes: int) -> int:
    """The bytes that have passed through the link when a call ends."""
    if cost.link != "memory":
        return cost.bytes_moved
    return cost.bytes_read + max(0, cost.bytes_written - l2_bytes)


def host_figures(cost: Cost, timing: Timing) -> dict[str, float | int]:
    """The metrics that need no ceiling."""
    metrics: dict[str, float | int] = {
        "p20_us": timing.p20_s * 1e6,
        "p50_us": timing.p50_s * 1e6,
        "p80_us": timing.p80_s * 1e6,
        "samples": timing.num_samples,
    }
    if cost.unit:
        metrics[f"{cost.unit}_per_s"] = cost.num_units / timing.p50_s
    metrics["needed_bytes"] = cost.bytes_moved
    metrics["flops"] = cost.flops
    # FLOPs a byte: where a point stands on the roofline.
    metrics["intensity"] = cost.flops / cost.bytes_moved
    return metrics


def _suspicion(cost: Cost, moved: int, timing: Timing, ceilings: Ceilings, link_rate: float) -> str:
    """Say which rate lies above the device's peak, so that bytes or FLOPs were counted wrong."""
    for what, achieved, peak, unit in (
        ("bytes", moved / timing.p50_s / 1e9, link_rate / 1e9, "GB/s"),
        (
            "FLOPs",
            cost.flops / timing.p50_s / 1e12,
            ceilings.matrix_flops_per_s / 1e12,
            "TFLOP/s",
        ),
    ):
        if achieved > TOLERANCE * peak:
            return (
                f"{achieved:.4g} {unit} is above the measured peak of {peak:.4g} {unit}: "
                f"{what} are counted wrong, or the call did not do all of its work"
            )
    return ""
