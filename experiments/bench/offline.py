"""What can be said of a kernel without a GPU: its machine code, its traffic, and a prediction."""

from kernels.launch import TARGETS
from kernels.offline import DTYPES, Report

from ..gpu import GpuConfig
from ..ranges import ConfigError
from ..results import AbsentError, Measurement
from .compiling import compile_elsewhere
from .config import AttentionConfig, BenchConfig, CacheDtype, Dtype, OperationConfig, describe
from .implementations.prefixlab import launched_splits
from .metering import Metered, meter
from .operations import operation_of
from .operations.attention import split_bytes
from .operations.operation import Cost

STATIC = (
    "registers",
    "spilled_bytes",
    "shared_bytes",
    "loads_16_bytes",
    "async_16_bytes",
    "matrix_instructions",
    "instructions_per_token",
)
"""Of a Report, what stands in a row."""
LAUNCH_S = 5e-6
"""About what it takes to launch a kernel and to wait for memory; no prediction below it is one."""


def report(config: BenchConfig) -> Measurement:
    """The offline form of a point: nothing is timed, and the times are predicted.

    Raises ConfigError for a GPU without a target, and AbsentError for other implementations than
    this project's.
    """
    gpu, shape = config.gpu, config.operation
    if gpu.target not in TARGETS:
        raise ConfigError(f"gpu.target={gpu.target}: expected one of {', '.join(TARGETS)}")
    if config.implementation != "prefixlab":
        raise AbsentError(f"{config.implementation}: without a GPU there is nothing to say of it")
    target = TARGETS[gpu.target]
    cache_dtype = getattr(shape, "cache_dtype", CacheDtype.auto)
    if cache_dtype is not CacheDtype.auto and not target.supports(DTYPES[cache_dtype.value]):
        raise AbsentError(f"{gpu.target} does not support {cache_dtype}")
    reports = compile_elsewhere(shape, gpu.target)
    shared_bytes = max(report.shared_bytes for report in reports)
    if shared_bytes > target.shared_memory:
        raise AbsentError(
            f"does not fit: {shared_bytes} bytes of shared memory, where {target.name} has "
            f"{target.shared_memory}"
        )
    cost = operation_of(shape).cost(shape)
    metered = _meter_once(shape)
    touched = cost.bytes_moved * (1.0 if metered is None else metered.ratio)
    if isinstance(shape, AttentionConfig):
        touched += split_bytes(shape, launched_splits(shape, target))
    metrics = {
        **static_figures(reports),
        **predicted_figures(cost, touched, gpu, getattr(shape, "dtype", Dtype.bf16)),
    }
    notes = {
        "kind": "predicted: nothing was timed",
        "target": target.name,
        "shape": describe(shape),
    }
    if metered is not None:
        # Bytes that the kernels touch over those that they have to, at a shape for the interpreter.
        metrics["touched_over_needed"] = metered.ratio
        notes["metered_shape"] = describe(metered.config)
    return Measurement(metrics, notes=notes)


_metered: dict[str, Metered | None] = {}


def _meter_once(shape: OperationConfig) -> Metered | None:
    """`meter`, once for all GPUs of a sweep."""
    key = repr(shape)
    if key not in _metered:
        _metered[key] = meter(shape)
    return _metered[key]


def static_figures(reports: list[Report]) -> dict[str, float | int]:
    """Of the first kernel, which does the work; but spills of all that are launched."""
    first = reports[0]
    figures = {name: getattr(first, name) for name in STATIC if getattr(first, name) is not None}
    figures["spilled_bytes"] = sum(report.spilled_bytes for report in reports)
    return figures


def predicted_figures(
    cost: Cost, touched_bytes: float, gpu: GpuConfig, dtype: Dtype
) -> dict[str, float | int]:
    """What the data sheet's rates make of an operation, without launches and latencies.

    touched_bytes: what the kernels touch, partial results of split keys included, as if all of it
    passed through the link; repeated reads may come from the L2 cache.
    """
    rate = gpu.memory_bytes_per_s if cost.link == "memory" else gpu.pcie_bytes_per_s
    matrix_rate = gpu.fp32_flops_per_s if dtype is Dtype.fp32 else gpu.flops_per_s
    bytes_s, flops_s = touched_bytes / rate, cost.flops / matrix_rate
    predicted_s = max(bytes_s, flops_s)
    return {
        "needed_bytes": cost.bytes_moved,
        "flops": cost.flops,
        # FLOPs a byte: where a point stands on the roofline.
        "intensity": cost.flops / cost.bytes_moved,
        # No implementation can be faster: each needed byte once, or the FLOPs if they take longer.
        "limit_us": max(cost.bytes_moved / rate, flops_s) * 1e6,
        "predicted_bytes_us": bytes_s * 1e6,
        "predicted_flops_us": flops_s * 1e6,
        "predicted_us": predicted_s * 1e6,
        "launch_bound": int(predicted_s < LAUNCH_S),
    }
