"""How a kernel is launched: the device's limits, the tiles that fit them, and one gate to Triton.

Tiles are plain values, chosen on the host from shapes and from the device, never from the lengths
of the sequences: a new batch must not compile anything. Every launcher goes through `launch`, so a
launch can also be recorded instead of made; `offline.py` compiles what was recorded for GPUs that
are not here, and tests count how many compilations a series of calls would cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from numbers import Real
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

# CUDA refuses more programs than this on any axis of the grid but the first.
MAX_GRID_YZ = 65_535


@dataclass(frozen=True)
class Target:
    """What a kernel has to know of a device: its instruction set and its limits."""

    name: str
    backend: str
    arch: int | str
    shared_memory: int
    multiprocessors: int
    warp_size: int = 32

    def supports(self, dtype: torch.dtype) -> bool:
        """True if kernels for this target can convert from and to `dtype`."""
        return dtype != torch.float8_e4m3fn or self.backend != "cuda" or int(self.arch) >= 89


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 166_912, 108),
        Target("sm_86", "cuda", 86, 101_376, 84),
        Target("sm_90", "cuda", 90, 232_448, 132),
        Target("sm_100", "cuda", 100, 232_448, 148),
        Target("sm_120", "cuda", 120, 101_376, 188),
        Target("gfx942", "hip", "gfx942", 65_536, 304, warp_size=64),
    )
}


@dataclass(frozen=True)
class AttentionTiles:
    """A program's share: `tile_q` query tokens x `tile_h` heads in `tile_m` rows, `tile_n` keys.

    A head's lanes are `tile_d` and, where one power of two would waste much, `tile_t` more.
    """

    tile_m: int
    tile_q: int
    tile_h: int
    tile_n: int
    tile_d: int
    tile_t: int
    num_warps: int
    num_stages: int


# The interpreter runs one program after the other, so it gains nothing from more of them.
INTERPRETER = replace(TARGETS["sm_90"], name="interpreter", multiprocessors=1)


@dataclass(frozen=True)
class Launch:
    """One launch as recorded: `args` in the kernel's order, `options` such as num_warps."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    options: dict[str, Any]


@dataclass
class _Recording:
    target: Target
    integer: int | None
    launches: list[Launch]


_recording: ContextVar[_Recording | None] = ContextVar("_recording", default=None)


@contextmanager
def record_launches(target: Target, integer: int | None = None) -> Iterator[list[Launch]]:
    """Collect launches instead of making them, with tiles as chosen for `target`.

    With `integer`, tiles are chosen as if every stride were that number.
    """
    token = _recording.set(_Recording(target, integer, []))
    try:
        yield _recording.get().launches
    finally:
        _recording.reset(token)


def target_of(device: torch.device) -> Target:
    """The limits of `device`, or of the target that launches are recorded for."""
    recording = _recording.get()
    if recording is not None:
        return recording.target
    if device.type == "cpu":
        return INTERPRETER
    return _gpu_target(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _gpu_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        return Target(arch, "hip", arch, 65_536, properties.multi_processor_count, 64)
    arch = properties.major * 10 + properties.minor
    shared_memory = properties.shared_memory_per_block_optin
    return Target(f"sm_{arch}", "cuda", arch, shared_memory, properties.multi_processor_count)


def are_aligned(*tensors: torch.Tensor) -> bool:
    """True if 16 divides every address and every stride but the last.

    That is when Triton loads 16 bytes at once.
    """
    recording = _recording.get()
    if recording is not None and recording.integer is not None:
        return recording.integer % 16 == 0
    return all(
        number % 16 == 0
        for tensor in tensors
        for number in (tensor.data_ptr(), *tensor.stride()[:-1])
    )


def is_interpreted(kernel: Any) -> bool:
    """True if TRITON_INTERPRET=1 was set when `kernel` was defined."""
    return not isinstance(kernel, JITFunction)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run `kernel` on `grid`: tensors and numbers in `args`, constexprs and options in `meta`.

    Raises ValueError for a grid that CUDA refuses, and RuntimeError for CPU tensors without the
    interpreter. A grid with no programs launches nothing.
    """
    if any(size > MAX_GRID_YZ for size in grid[1:]):
        raise ValueError(f"a grid of {grid} programs: only the first axis may pass {MAX_GRID_YZ}")
    recording = _recording.get()
    if recording is not None:
        names = list(kernel.arg_names)
        bound = dict(zip(names, args, strict=False))
        bound.update({name: meta[name] for name in names if name in meta})
        options = {name: value for name, value in meta.items() if name not in names}
        recording.launches.append(Launch(kernel, grid, bound, options))
        return
    if 0 in grid:
        return
    devices = [arg.device for arg in args if isinstance(arg, torch.Tensor)]
    on_cpu = any(device.type == "cpu" for device in devices)
    if on_cpu and not is_interpreted(kernel):
        raise RuntimeError(
            "Triton kernels need a GPU. For CPU tensors set TRITON_INTERPRET=1 before importing "
            "kernels, or call the operation of the same name in kernels.reference"
        )
    # Triton launches on the current GPU, wherever the tensors are.
    elsewhere = devices and devices[0].type == "cuda"
    with torch.cuda.device(devices[0]) if elsewhere else nullcontext():
        kernel[grid](*args, **meta)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n."""
    return triton.next_power_of_2(n)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def check_devices(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors are on the first one's device."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    (first, device), *_ = ((name, tensor.device) for name, tensor in present.items())
    for name, tensor in present.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, {first} on {device}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    contiguous_last: bool = True,
) -> None:
    """Raise ValueError unless `tensor` has this shape (None: any), dtype and unit last stride."""
    fits = len(shape) == tensor.ndim and all(
        want in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, not [{wanted}]")
    if dtypes and tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not {wanted}")
    # An empty array of numpy's has strides of 0, and nothing is read from it.
    strided = contiguous_last and tensor.numel() > 0 and tensor.ndim > 0
    if strided and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}: the last one must be 1")


def check_positive(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a positive, finite number."""
    if not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}: it must be a positive number")


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is an int, and at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value}: it must be an integer of at least {least}")


def check_written(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if several elements of `tensor` share an address, as after `expand`."""
    layout = zip(tensor.shape, tensor.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in layout) and tensor.numel():
        raise ValueError(
            f"{name} has strides {tensor.stride()}: what is written can't have one of 0"
        )


def check_sizes(**sizes: int) -> None:
    """Raise ValueError if one of `sizes` is 0."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}")


def check_scale(
    name: str, scale: float | torch.Tensor | None, num_kv_heads: int, device: torch.device
) -> tuple[float, torch.Tensor | None, int]:
    """(number, tensor, stride) for a kernel that takes a scale as a number or one a KV head.

    A number stands in an argument, so that it needs no copy to the device; a tensor is read by the
    kernel, so that it may be computed there.
    """
    if not isinstance(scale, torch.Tensor):
        if scale is not None:
            check_positive(name, scale)
        return 1.0 if scale is None else float(scale), None, 0
    check_devices(query=torch.empty(0, device=device), **{name: scale})
    if scale.dtype != torch.float32 or scale.numel() not in (1, num_kv_heads) or scale.ndim > 1:
        raise ValueError(
            f"{name} is {scale.dtype} of shape {list(scale.shape)}, not float32 with one element "
            f"or {num_kv_heads}"
        )
    return 1.0, scale, scale.stride(0) if scale.numel() > 1 else 0


def check_supported(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if kernels on the tensor's device cannot handle its dtype."""
    target = target_of(tensor.device)
    if not target.supports(tensor.dtype):
        raise ValueError(f"{name} is {tensor.dtype}, which {target.name} does not support")


def head_tiles(head_size: int) -> tuple[int, int]:
    """`head_size` lanes as one power of two, or as two if that pads less: 576 is (512, 64)."""
    whole = max(16, next_power_of_2(head_size))
    main = whole // 2
    tail = max(16, next_power_of_2(head_size - main)) if main >= 16 else whole
    return (main, tail) if main + tail < whole else (whole, 0)


# (tile_m, tile_n, num_warps, num_stages) of paged attention for heads of up to so many lanes, for
# decode and for longer queries. Chosen with `python -m kernels.offline --extra`: large tiles that
# spill nothing on any target of the backend, with every option of the call in use. Where tiles were
# timed, `python -m experiments.bench.tiles --write` puts the fastest here.
Tile = tuple[int, int, int, int]
_ATTENTION_TILES: dict[tuple[str, str], list[tuple[int, Tile, Tile]]] = {
    ("sm_90", "16-bit"): [
        (128, (16, 64, 2, 3), (64, 64, 4, 3)),
        (192, (16, 64, 4, 3), (64, 32, 4, 3)),
        (256, (16, 64, 4, 3), (64, 64, 8, 3)),
        (576, (16, 16, 8, 2), (32, 32, 8, 2)),
    ],
    ("sm_120", "16-bit"): [
        (128, (16, 64, 2, 3), (64, 32, 4, 3)),
        (192, (16, 64, 4, 3), (32, 32, 4, 2)),
        (256, (16, 64, 4, 3), (64, 32, 8, 2)),
        (576, (16, 32, 8, 1), (16, 32, 8, 1)),
    ],
    ("sm_100", "16-bit"): [
        (128, (16, 64, 2, 3), (64, 64, 4, 2)),
        (192, (16, 64, 4, 3), (32, 32, 4, 2)),
        (256, (16, 64, 4, 3), (64, 32, 8, 2)),
        (576, (16, 32, 8, 1), (16, 32, 8, 1)),
    ],
    ("cuda", "16-bit"): [
        (128, (16, 64, 2, 3), (64, 32, 4, 2)),
        (192, (16, 64, 4, 3), (32, 32, 4, 2)),
        (256, (16, 64, 4, 3), (64, 32, 8, 2)),
        (576, (16, 32, 8, 1), (16, 32, 8, 1)),
    ],
    ("sm_90", "fp8 cache"): [
        (64, (16, 64, 2, 3), (64, 64, 4, 3)),
        (128, (16, 64, 2, 3), (64, 64, 4, 2)),
        (192, (16, 64, 4, 3), (64, 64, 4, 2)),
        (256, (16, 64, 4, 3), (16, 32, 8, 1)),
        (576, (16, 32, 8, 1), (16, 32, 8, 1)),
    ],
    ("cuda", "fp8 cache"): [
        (64, (16, 64, 2, 3), (64, 64, 4, 3)),
        (128, (16, 64, 2, 3), (64, 32, 4, 2)),
        (192, (16, 64, 4, 3), (32, 32, 8, 2)),
        (256, (16, 64, 4, 3), (16, 32, 8, 1)),
        (576, (16, 32, 8, 1), (16, 32, 8, 1)),
    ],
    ("cuda", "32-bit"): [
        (64, (16, 32, 4, 3), (32, 32, 8, 2)),
        (96, (16, 16, 8, 2), (16, 16, 8, 1)),
        (128, (16, 16, 8, 2), (16, 16, 8, 2)),
        (256, (16, 32, 8, 2), (16, 16, 8, 2)),
        (576, (8, 16, 8, 1), (8, 16, 8, 1)),
    ],
    ("hip", "16-bit"): [
        (192, (16, 64, 4, 2), (64, 32, 4, 2)),
        (256, (16, 32, 4, 2), (64, 32, 4, 2)),
        (576, (16, 32, 4, 1), (32, 32, 4, 1)),
    ],
    ("hip", "fp8 cache"): [
        (256, (16, 64, 4, 2), (64, 32, 4, 2)),
        (576, (16, 32, 4, 2), (16, 16, 8, 1)),
    ],
    ("hip", "32-bit"): [
        (128, (16, 32, 4, 2), (32, 32, 4, 1)),
        (256, (16, 32, 4, 1), (32, 32, 4, 1)),
        (576, (16, 16, 4, 1), (16, 16, 4, 1)),
    ],
}

# Strides or addresses that 16 doesn't divide: elements come one by one, through registers.
_UNALIGNED_TILES: dict[tuple[str, str], list[tuple[int, Tile, Tile]]] = {
    ("cuda", "16-bit"): [
        (64, (16, 16, 4, 1), (16, 16, 4, 1)),
        (128, (16, 16, 4, 1), (16, 16, 8, 1)),
        (576, (16, 16, 8, 1), (16, 16, 8, 1)),
    ],
    ("cuda", "32-bit"): [
        (64, (16, 16, 8, 1), (8, 16, 8, 1)),
        (96, (16, 16, 4, 1), (8, 16, 8, 1)),
        (128, (16, 16, 4, 1), (16, 16, 4, 1)),
        (256, (16, 16, 8, 1), (16, 16, 8, 1)),
        (576, (8, 16, 8, 1), (8, 16, 8, 1)),
    ],
    ("hip", "16-bit"): [
        (128, (16, 16, 4, 1), (16, 16, 8, 1)),
        (256, (16, 16, 8, 1), (16, 16, 8, 1)),
        (576, (16, 16, 4, 1), (16, 16, 4, 1)),
    ],
    ("hip", "32-bit"): [
        (128, (16, 16, 4, 1), (16, 16, 8, 1)),
        (256, (16, 16, 8, 1), (16, 16, 8, 1)),
        (576, (16, 16, 4, 1), (16, 16, 4, 1)),
    ],
}

# With the backend's 8 warps, prefill at this size spills on sm_120, and with 16 on sm_100.
_UNALIGNED_TILES["sm_120", "32-bit"] = [
    *_UNALIGNED_TILES["cuda", "32-bit"][:-1],
    (576, (8, 16, 8, 1), (8, 16, 16, 1)),
]

# The interpreter pays for each operation, not for each element.
_INTERPRETER_TILES: list[tuple[int, Tile, Tile]] = [(576, (16, 64, 1, 1), (64, 64, 1, 1))]

_override: ContextVar[Tile | None] = ContextVar("_override", default=None)


@contextmanager
def override_attention_tile(tile: Tile) -> Iterator[None]:
    """Within the block paged attention takes `tile`, whatever the tables say.

    Raises ValueError for a number below 1, or for one other than num_stages that is no power of
    two. What a device can't hold fails at the launch.
    """
    for name, value in zip(("tile_m", "tile_n", "num_warps", "num_stages"), tile, strict=True):
        check_integer(name, value, 1)
        if name != "num_stages" and value != next_power_of_2(value):
            raise ValueError(f"{name} is {value}: it must be a power of two")
    token = _override.set(tile)
    try:
        yield
    finally:
        _override.reset(token)


def tile_kind(cache_bytes: int, query_bytes: int) -> str:
    """What the tables of tiles call caches and queries of so many bytes an element."""
    return "32-bit" if query_bytes == 4 else {1: "fp8 cache", 2: "16-bit"}[cache_bytes]


def attention_tiles(
    target: Target,
    head_size: int,
    group: int,
    cache_bytes: int,
    query_bytes: int,
    *,
    decode: bool,
    aligned: bool,
) -> AttentionTiles:
    """The tiles of paged attention for `group` query heads a KV head.

    `aligned` says whether 16 divides the caches' strides and addresses, `decode` that queries are
    one token.
    """
    kind = tile_kind(cache_bytes, query_bytes)
    if target is INTERPRETER:
        rows = _INTERPRETER_TILES
    else:
        rows = _ATTENTION_TILES.get((target.name, kind), _ATTENTION_TILES[target.backend, kind])
        if not aligned:
            width = "32-bit" if query_bytes == 4 else "16-bit"
            rows = _UNALIGNED_TILES.get(
                (target.name, width), _UNALIGNED_TILES[target.backend, width]
            )
    decode_tile, prefill_tile = next(tiles for most, *tiles in rows if head_size <= most)
    # Decode of more heads than its tile has rows is no different from a longer query.
    small = decode and group <= decode_tile[0]
    tile = _override.get() or (decode_tile if small else prefill_tile)
    tile_m, tile_n, num_warps, num_stages = tile
    tile_h = min(group, tile_m)
    tile_d, tile_t = head_tiles(head_size)
    return AttentionTiles(
        tile_m=tile_m,
        tile_q=1 if decode else tile_m // tile_h,
        tile_h=tile_h,
        tile_n=tile_n,
        tile_d=tile_d,
        tile_t=tile_t,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def num_kv_splits(target: Target, programs: int, max_keys: int) -> int:
    """Into how many parts to split up to `max_keys` keys, so that `programs` fill the device.

    It depends on what the host knows without asking the device, so a captured graph stays valid.
    """
    wanted = cdiv(2 * target.multiprocessors, max(programs, 1))
    return max(1, min(wanted, cdiv(max_keys, 256), 64))


@dataclass(frozen=True)
class HashTiles:
    """Blocks and 64-bit words that a program hashes at a time, a whole block being in one tile."""

    tile_blocks: int
    tile_words: int
    options: dict[str, int]


def hash_tiles(target: Target, block_size: int) -> HashTiles:
    """The tiles of hashing and matching: short enough to stop soon after the chain breaks."""
    tile_words = next_power_of_2(cdiv(block_size, 2))
    options = {"num_warps": 4}
    if target.backend == "cuda":
        # Without a limit the assembler spills to fit more programs, and there is one a sequence.
        options["maxnreg"] = 168
    return HashTiles(max(1, min(128, 512 // tile_words)), tile_words, options)


def copy_tile(word_bytes: int, block_words: int) -> int:
    """The words that a program of 4 warps copies: 4 x 16 bytes a thread, or a whole block."""
    return min(8192 // word_bytes, next_power_of_2(block_words))
