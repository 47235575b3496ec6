"""What the device itself can do, for measured rates to be held against."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from .config import TimingConfig
from .timing import ROW, Call, Clock, read_rows, time_call

log = logging.getLogger(__name__)

GPU_BYTES, CPU_BYTES = 2**30, 4 * 2**20
GPU_MATRIX_SIZE, CPU_MATRIX_SIZE = 8192, 128
CHECKED_ROWS = 16

Seconds = Callable[[Call], float]


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one device, and of one dtype of matrices.

    copy_bytes_per_s counts bytes read and bytes written, read_bytes_per_s is of the fastest of
    several ways to read. empty_call_s is what the clock says of a call that does next to nothing:
    one that takes little longer is bound by its launch.
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    matrix_flops_per_s: float
    to_host_bytes_per_s: float
    from_host_bytes_per_s: float
    empty_call_s: float

    @property
    def memory_bytes_per_s(self) -> float:
        """Of copy and read the faster: what mostly reads may beat a copy, which also writes."""
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)


def measure_ceilings(
    device: torch.device,
    dtype: torch.dtype,
    clock: Clock,
    options: TimingConfig,
    num_bytes: int | None = None,
    matrix_size: int | None = None,
) -> Ceilings:
    """Check, then time, plain torch operations on random data; rates are those of the median.

    num_bytes: of what is copied and read, and four times what is copied from and to the host; 64
    KiB at least, and several times any L2 cache; None: 1 GiB on a GPU, 4 MiB on a CPU.
    matrix_size: rows and columns of the matrices; None: 8192 and 128.
    Raises RuntimeError if an answer is wrong.
    """
    on_gpu = device.type == "cuda"
    num_bytes = num_bytes or (GPU_BYTES if on_gpu else CPU_BYTES)
    matrix_size = matrix_size or (GPU_MATRIX_SIZE if on_gpu else CPU_MATRIX_SIZE)
    # At these sizes the L2 cache makes no difference.
    large = replace(options, cold_l2=False)

    def seconds(call: Call) -> float:
        return time_call(call, clock, large).p50_s

    values = _random(num_bytes, device)
    part = values[: len(values) // 4]
    # Pinned: only then copies run at full speed. The first of the two copies fills it.
    host = torch.empty(part.shape, pin_memory=on_gpu)
    to_host_s = _copy_s(host, part, seconds)
    from_host_s = _copy_s(torch.empty_like(part), host, seconds)
    return Ceilings(
        copy_bytes_per_s=2 * values.nbytes / _copy_s(torch.empty_like(values), values, seconds),
        read_bytes_per_s=values.nbytes / _read_s(values, seconds),
        matrix_flops_per_s=2 * matrix_size**3 / _matmul_s(matrix_size, device, dtype, seconds),
        to_host_bytes_per_s=part.nbytes / to_host_s,
        from_host_bytes_per_s=part.nbytes / from_host_s,
        empty_call_s=_empty_call_s(device, clock, options),
    )


def _random(num_bytes: int, device: torch.device) -> torch.Tensor:
    """fp32 [num_bytes / 4 / ROW, ROW] in [0, 1]; viewed as bf16 [.., 2 * ROW] they are, too."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (num_bytes // (4 * ROW), 2 * ROW)
    halves = torch.rand(shape, dtype=torch.bfloat16, device=device, generator=generator)
    # The upper half of a fp32 number is a bf16 number, and the lower may be anything.
    return halves.view(torch.float32)


def _copy_s(target: torch.Tensor, source: torch.Tensor, seconds: Seconds) -> float:
    target.fill_(torch.nan)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    copy()
    # Whatever moves to the GPU for this does so after the copy, on the same stream.
    device = target.device if target.is_cuda else source.device
    _check("copy", torch.equal(target.to(device), source.to(device)))
    return seconds(copy)


def _read_s(values: torch.Tensor, seconds: Seconds) -> float:
    """In the fastest of several ways: none of them is sure to be as fast as the memory."""
    ways_s = {
        "row sums": _row_sums_s(values, seconds),
        "float32 products": _products_s(values, seconds),
        "bfloat16 products": _products_s(values.view(torch.bfloat16), seconds),
    }
    fastest = min(ways_s, key=ways_s.__getitem__)
    log.info("Memory is read fastest by %s; seconds: %s", fastest, ways_s)
    return ways_s[fastest]


def _row_sums_s(values: torch.Tensor, seconds: Seconds) -> float:
    sums = torch.full((len(values),), torch.nan, device=values.device)

    def read() -> None:
        read_rows(values, sums)

    read()
    exact = values.sum(dim=1, dtype=torch.float64)
    _check("read by row sums", torch.allclose(sums.double(), exact, rtol=1e-5))
    return seconds(read)


def _products_s(matrix: torch.Tensor, seconds: Seconds) -> float:
    """Of the rows and one vector of random signs: against sums that stay small, errors show."""
    size = matrix.shape[1]
    generator = torch.Generator(matrix.device).manual_seed(0)
    signs = torch.randn(size, device=matrix.device, generator=generator).sign().to(matrix.dtype)
    products = matrix.new_full((len(matrix),), torch.nan)

    def read() -> None:
        torch.mv(matrix, signs, out=products)

    with _without_tf32():
        read()
        # The signed numbers themselves are exact in any dtype.
        exact = (matrix * signs).sum(dim=1, dtype=torch.float64)
        error = (products.double() - exact).abs().max().item()
        name = str(matrix.dtype).removeprefix("torch.")
        right = error <= _matmul_tolerance(size, matrix.dtype)
        _check(f"read by {name} products", right)
        return seconds(read)


def _matmul_s(size: int, device: torch.device, dtype: torch.dtype, seconds: Seconds) -> float:
    """Of normally distributed matrices: zeros take less power, so they run at a higher clock."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    product = torch.full_like(a, torch.nan)

    def multiply() -> None:
        torch.matmul(a, b, out=product)

    with _without_tf32():
        multiply()
        exact = a[:CHECKED_ROWS].double() @ b.double()
        error = (product[:CHECKED_ROWS].double() - exact).abs().max().item()
        _check("matmul", error <= _matmul_tolerance(size, dtype))
        return seconds(multiply)


def _matmul_tolerance(size: int, dtype: torch.dtype) -> float:
    """Rounding of results of some sqrt(size), and of fp32 sums; TF32 would exceed it for fp32."""
    return 8 * torch.finfo(dtype).eps * size**0.5 + torch.finfo(torch.float32).eps * size


@contextmanager
def _without_tf32() -> Iterator[None]:
    """fp32 matrices are multiplied as such."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _empty_call_s(device: torch.device, clock: Clock, options: TimingConfig) -> float:
    """As cold or warm as the calls that it is held against."""
    one = torch.zeros(1, device=device)
    return time_call(lambda: one.add_(1), clock, options).p50_s


def _check(what: str, right: bool) -> None:
    if not right:
        raise RuntimeError(f"{what}: wrong answer from the device, so its speed is not measured")
