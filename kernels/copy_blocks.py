"""Block copies: copy-on-write within a cache, and the one kernel that gather and swap share.

For every tensor t and every pair (s, d)

    destination[t][d, :, :, :] = source[t][s, :, :, :]

bit for bit, with every source read as it was before the call.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from .launch import cdiv, copy_tile, launch
from .offline import DTYPES, OfflineCase

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32}

Pairs = torch.Tensor | np.ndarray | Sequence[tuple[int, int]]


@triton.jit(
    do_not_specialize=[
        "stride_src_block",
        "stride_src_token",
        "stride_src_head",
        "stride_dst_block",
        "stride_dst_token",
        "stride_dst_head",
        "block_units",
        "head_units",
        "num_heads",
        "num_tensors",
        "num_tiles",
    ]
)
def copy_blocks_kernel(
    src_addresses,  # int64 [num_tensors], where each source tensor begins
    dst_addresses,  # int64 [num_tensors]
    pairs,  # int64 [num_pairs, 2], a source of -1 copies nothing
    stride_src_block,  # strides and sizes count units of UNIT_WORDS words
    stride_src_token,
    stride_src_head,
    stride_dst_block,
    stride_dst_token,
    stride_dst_head,
    block_units,
    head_units,
    num_heads,
    num_tensors,
    num_tiles,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    UNIT_WORDS: tl.constexpr,
    FLAT: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    program = tl.program_id(0)
    tile = program % num_tiles
    tensor = program // num_tiles % num_tensors
    pair = (program // num_tiles // num_tensors).to(tl.int64)
    src_block = tl.load(pairs + 2 * pair)
    dst_block = tl.load(pairs + 2 * pair + 1)
    if src_block >= 0:
        src = tl.load(src_addresses + tensor).to(tl.pointer_type(WORD))
        dst = tl.load(dst_addresses + tensor).to(tl.pointer_type(WORD))
        src = tl.multiple_of(src, UNIT_WORDS * WORD_BYTES)
        dst = tl.multiple_of(dst, UNIT_WORDS * WORD_BYTES)
        word = tile * TILE_WORDS + tl.arange(0, TILE_WORDS)  # [TILE_WORDS]
        mask = word < block_units * UNIT_WORDS
        # Sizes are multiplied by UNIT_WORDS here, so that the compiler sees what divides them.
        if FLAT:
            src_word = word
            dst_word = word
        else:
            head_words = head_units * UNIT_WORDS
            row = word // head_words
            token = (row // num_heads).to(tl.int64)
            head = (row % num_heads).to(tl.int64)
            column = word % head_words
            src_word = (token * stride_src_token + head * stride_src_head) * UNIT_WORDS + column
            dst_word = (token * stride_dst_token + head * stride_dst_head) * UNIT_WORDS + column
        src += src_block * stride_src_block * UNIT_WORDS
        dst += dst_block * stride_dst_block * UNIT_WORDS
        words = tl.load(src + src_word, mask=mask)
        tl.store(dst + dst_word, words, mask=mask)


def copy_blocks(
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    block_mapping: Pairs,
) -> None:
    """Copy whole blocks within every layer's cache, as copy-on-write asks.

    One launch for all layers. A block that is a source of one pair and the destination of another
    is read before it is written: such sources pass through a staging buffer, in further launches.

    Args:
        key_caches: a tensor a layer, [num_blocks, block_size, num_kv_heads, head_size], any dtype
            and strides whose last one is 1; written in place.
        value_caches: likewise; the head size may differ from the keys'.
        block_mapping: int64 [num_pairs, 2] of (source, destination), on the CPU (a tensor on a GPU
            is fetched first, which waits for it).

    Raises:
        ValueError: before anything is copied, for ids outside [0, num_blocks), a destination that
            occurs twice, caches that differ in shape, dtype or device, or overlapping blocks.

    Example: `copy_blocks([k0, k1], [v0, v1], [(3, 7), (3, 8)])` makes blocks 7 and 8 equal block 3
    in both layers.
    """
    num_blocks = check_caches(key_caches, value_caches)
    pairs = check_pairs("block_mapping", block_mapping, num_blocks, num_blocks)
    caches = [*key_caches, *value_caches]
    copy_within(CopyPlan(caches, caches), pairs)


def copy_within(plan: CopyPlan, pairs: np.ndarray) -> None:
    """Copy checked pairs, int64 [n, 2], within each tensor of a plan, all sources read first."""
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    overwritten = np.isin(pairs[:, 0], pairs[:, 1])
    if not overwritten.any():
        plan.run(pairs)
        return
    staged = StagedBlocks(plan.sources, pairs[overwritten, 0], plan.device)
    plan.run(pairs[~overwritten])
    staged.copy_to(plan.destinations, pairs[overwritten, 1])


class StagedBlocks:
    """A copy of some blocks of each cache, so that the caches can be written meanwhile."""

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: np.ndarray,  # int64 [n], repeats allowed
        device: torch.device,
    ) -> None:
        distinct, self._rows = np.unique(block_ids, return_inverse=True)
        self._blocks = [
            torch.empty((len(distinct), *cache.shape[1:]), dtype=cache.dtype, device=device)
            for cache in caches
        ]
        rows = np.arange(len(distinct))
        CopyPlan(caches, self._blocks).run(np.stack([distinct, rows], axis=1))

    def copy_to(self, caches: Sequence[torch.Tensor], destinations: np.ndarray) -> None:
        """Write the i-th staged block to block destinations[i] of each cache."""
        CopyPlan(self._blocks, caches).run(np.stack([self._rows, destinations], axis=1))


class _Geometry(NamedTuple):
    """How one tensor's blocks lie in memory; tensors that agree are copied by one launch."""

    unit_bytes: int
    flat: bool
    strides: tuple[int, ...]  # source block, token, head; destination block, token, head
    block_units: int
    head_units: int
    num_heads: int


class CopyPlan:
    """How blocks get from each source tensor to the destination beside it: made once, run often.

    Attributes:
        sources, destinations: the tensors, which have to stay where they are.
        device: the GPU that copies, or the CPU.

    Raises:
        ValueError: for tensors that no one device can reach.
    """

    def __init__(
        self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]
    ) -> None:
        self.sources = sources
        self.destinations = destinations
        self.device = launch_device([*sources, *destinations])
        self._groups: dict[_Geometry, list[tuple[int, int]]] = {}
        for source, destination in zip(sources, destinations, strict=True):
            if source.numel() and destination.numel():
                addresses = (source.data_ptr(), destination.data_ptr())
                geometry = _geometry(
                    source.element_size(),
                    source.shape[1:],
                    source.stride(),
                    destination.stride(),
                    math.gcd(16, *addresses),
                )
                self._groups.setdefault(geometry, []).append(addresses)

    def run(self, pairs: np.ndarray | torch.Tensor) -> None:
        """Copy checked pairs, int64 [n, 2]; an array is uploaded, a tensor used where it is.

        No destination may be a source as well: programs run in any order.
        """
        if not len(pairs):
            return
        if not isinstance(pairs, torch.Tensor):
            pairs = to_device(pairs, self.device)
        for geometry, addresses in self._groups.items():
            self._launch(geometry, addresses, pairs)

    def _launch(
        self, geometry: _Geometry, addresses: list[tuple[int, int]], pairs: torch.Tensor
    ) -> None:
        word_bytes = min(4, geometry.unit_bytes)
        unit_words = geometry.unit_bytes // word_bytes
        block_words = geometry.block_units * unit_words
        tile_words = copy_tile(word_bytes, block_words)
        src_addresses, dst_addresses = zip(*addresses, strict=True)
        launch(
            copy_blocks_kernel,
            copy_grid(len(pairs), len(addresses), block_words, tile_words),
            address_tables.get(src_addresses, self.device),
            address_tables.get(dst_addresses, self.device),
            pairs,
            *geometry.strides,
            geometry.block_units,
            geometry.head_units,
            geometry.num_heads,
            len(addresses),
            cdiv(block_words, tile_words),
            WORD=WORDS[word_bytes],
            WORD_BYTES=word_bytes,
            UNIT_WORDS=unit_words,
            FLAT=geometry.flat,
            TILE_WORDS=tile_words,
            num_warps=4,
        )


def copy_grid(
    num_pairs: int, num_tensors: int, block_words: int, tile_words: int
) -> tuple[int, ...]:
    """One program a pair, tensor and tile of a block, all on the one axis that may grow."""
    return (num_pairs * num_tensors * cdiv(block_words, tile_words),)


@lru_cache(maxsize=256)
def _geometry(
    element_size: int,
    block_shape: tuple[int, ...],  # block size, heads, head size
    src_strides: tuple[int, ...],  # block, token, head, element
    dst_strides: tuple[int, ...],
    alignment: int,  # of both addresses, at most 16 bytes
) -> _Geometry:
    num_heads, head_size = block_shape[1:]
    block_bytes = math.prod(block_shape) * element_size
    head_bytes = head_size * element_size
    flat = _is_dense(block_shape, src_strides[1:]) and src_strides[1:] == dst_strides[1:]
    strides = [stride * element_size for stride in (*src_strides[:3], *dst_strides[:3])]
    # A block that is one run is copied as such; else the smallest runs are heads.
    steps = [block_bytes, strides[0], strides[3]] if flat else [head_bytes, *strides]
    unit_bytes = math.gcd(alignment, *steps)
    return _Geometry(
        unit_bytes,
        flat,
        tuple(stride // unit_bytes for stride in strides),
        block_bytes // unit_bytes,
        head_bytes // unit_bytes,
        num_heads,
    )


def _is_dense(block_shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True if a block is one run of memory, whatever the order of its axes."""
    expected = 1
    for stride, size in sorted(zip(strides, block_shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


class AddressTables:
    """Lists of addresses on a device, each uploaded once and then shared by launches on any stream.

    A table is complete before anything can read it. The least recently used one is given up for a
    new one, but its memory isn't used again before the streams that read it have done so. A graph
    may be replayed at any time, so a table that was captured stays for good.
    """

    def __init__(self, max_tables: int = 256) -> None:
        self._max_tables = max_tables
        self._recent: OrderedDict[tuple, torch.Tensor] = OrderedDict()
        self._captured: dict[tuple, torch.Tensor] = {}
        self._lock = Lock()

    def get(self, addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Return the addresses as int64 [n] on `device`, for a launch on the current stream.

        Raises:
            RuntimeError: for a table that would have to be made while a graph is captured.
        """
        key = (addresses, device)
        capturing = is_capturing(device)
        with self._lock:
            table = self._captured.get(key)
            if table is None:
                table = self._recent.pop(key, None)
            if table is None:
                if capturing:
                    raise RuntimeError(
                        "these tensors' addresses are not on the device yet, and can't be uploaded "
                        "during graph capture: run once with the same tensors before capturing"
                    )
                table = _upload_now(np.array(addresses, dtype=np.int64), device)
            if capturing or key in self._captured:
                self._captured[key] = table
            else:
                self._recent[key] = table
                if len(self._recent) > self._max_tables:
                    self._recent.popitem(last=False)
        if device.type != "cpu" and not capturing:
            table.record_stream(torch.cuda.current_stream(device))
        return table


address_tables = AddressTables()


def is_capturing(device: torch.device) -> bool:
    """Whether what is queued on the device's current stream goes into a graph."""
    if device.type == "cpu":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _upload_now(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to `device` and wait for that copy, but not for the work queued there."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    with torch.cuda.stream(_upload_stream(device)):
        return tensor.to(device)


@cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to `device` without waiting for the work that is queued there.

    The copy reads a pinned buffer of its own, which torch gives to nobody else while it is read.

    Raises:
        RuntimeError: during graph capture, because a replay would read that buffer too late.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    if is_capturing(device):
        raise RuntimeError("arrays of the host can't be uploaded during graph capture")
    return tensor.pin_memory().to(device, non_blocking=True)


def launch_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The one GPU that the tensors are on, host memory beside it being pinned; else the CPU.

    Raises:
        ValueError: for two devices, or host memory that the GPU cannot reach.
    """
    devices = sorted({tensor.device for tensor in tensors if tensor.device.type != "cpu"}, key=str)
    if not devices:
        return torch.device("cpu")
    if len(devices) > 1:
        raise ValueError(f"tensors on {devices[0]} and {devices[1]}: one device is expected")
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel() and not tensor.is_pinned():
            raise ValueError(f"host memory beside tensors on {devices[0]} has to be pinned")
    return devices[0]


def check_blocks(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first of `tensors`, all of them blocks of the same shape, dtype and device.

    Raises:
        ValueError: naming the tensor that differs or can't be addressed.
    """
    if not len(tensors):
        raise ValueError(f"{name} holds no tensor")
    first = tensors[0]
    if first.ndim != 4:
        raise ValueError(
            f"{name}[0] has shape {list(first.shape)}; expected 4 axes: "
            "[num_blocks, block_size, num_kv_heads, head_size]"
        )
    shape, dtype, device = first.shape, first.dtype, first.device
    checked_strides = set()
    for index, tensor in enumerate(tensors):
        where = f"{name}[{index}]"
        if tensor.shape != shape:
            raise ValueError(f"{where} has shape {list(tensor.shape)}, {name}[0] {list(shape)}")
        if tensor.dtype != dtype:
            raise ValueError(f"{where} has dtype {tensor.dtype}, {name}[0] {dtype}")
        if tensor.device != device:
            raise ValueError(f"{where} has device {tensor.device}, {name}[0] {device}")
        strides = tensor.stride()
        if strides not in checked_strides:
            _check_strides(where, shape, strides)
            checked_strides.add(strides)
    return first


def _check_strides(where: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    if shape[3] > 1 and strides[3] != 1:
        raise ValueError(f"{where} has strides {strides}: the last one must be 1")
    if any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
        raise ValueError(f"{where} has strides {strides}: elements overlap")
    reach = 1  # the elements from the first to the last, over the axes that were stepped through
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < reach:
                raise ValueError(f"{where} has strides {strides}: elements overlap")
            reach += (size - 1) * stride


class _Extent(NamedTuple):
    """Which bytes a tensor has: sizes and strides of its axes, in bytes, the last axis one byte."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """From the first byte to the last, gaps included."""
        steps = zip(self.sizes, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)


def check_blocks_apart(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if a block of one tensor shares memory with another block of another one.

    Blocks of the same number may overlap: values that are a view of the keys are copied with them.
    """
    shared = _find_shared(*_where(tensors), num_first=0)
    if shared is not None:
        first, second = (names[index] for index in shared)
        raise ValueError(f"{first} and {second} share memory, but not block for block")


def check_apart(
    name: str,
    tensors: Sequence[torch.Tensor],
    other_name: str,
    others: Sequence[torch.Tensor],
) -> None:
    """Raise ValueError if one of `tensors` shares memory with one of `others`."""
    shared = _find_shared(*_where([*tensors, *others]), num_first=len(tensors))
    if shared is not None:
        ours, theirs = shared[0], shared[1] - len(tensors)
        raise ValueError(
            f"{name}[{ours}] and {other_name}[{theirs}] share memory: what is read may have been "
            "written"
        )


def _where(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], tuple[_Extent, ...]]:
    return (
        tuple(tensor.data_ptr() for tensor in tensors),
        tuple(_extent(t.shape, t.stride(), t.element_size()) for t in tensors),
    )


@lru_cache(maxsize=256)
def _extent(shape: tuple[int, ...], strides: tuple[int, ...], element_size: int) -> _Extent:
    return _Extent((*shape, element_size), (*(stride * element_size for stride in strides), 1))


@lru_cache(maxsize=64)
def _find_shared(
    addresses: tuple[int, ...], extents: tuple[_Extent, ...], num_first: int
) -> tuple[int, int] | None:
    """The first two tensors that share memory in a way that matters, or None.

    If num_first is 0: two of which different blocks do. Else: one of the first `num_first` tensors
    and one of the others.
    """
    filled = [i for i, extent in enumerate(extents) if all(extent.sizes)]
    order = sorted(filled, key=lambda i: (addresses[i], i))
    for at, low in enumerate(order):
        end = addresses[low] + extents[low].num_bytes
        for high in order[at + 1 :]:
            distance = addresses[high] - addresses[low]
            if addresses[high] >= end:
                break
            if num_first and (low < num_first) == (high < num_first):
                continue
            if _overlap(extents[low], extents[high], distance, other_blocks_only=not num_first):
                return min(low, high), max(low, high)
    return None


def _overlap(low: _Extent, high: _Extent, distance: int, *, other_blocks_only: bool) -> bool:
    """Whether two tensors, `distance` bytes apart, have a byte in common."""
    axes = []  # (stride, low's size, high's size, whether it counts the blocks)
    for axis, (low_size, high_size) in enumerate(zip(low.sizes, high.sizes, strict=True)):
        strides = {extent.strides[axis] for extent in (low, high) if extent.sizes[axis] > 1}
        if len(strides) > 1:
            return True  # their ranges intersect, and no layout would mix the two
        for stride in strides:
            axes.append((stride, low_size, high_size, axis == 0))
    axes.sort()

    # A common byte's indices differ by d on each axis, and distance = sum of d * stride.
    def is_sum(distance: int, count: int, same_block: bool) -> bool:
        if not count:
            return distance == 0 and not (other_blocks_only and same_block)
        stride, low_size, high_size, is_block = axes[count - 1]
        least = sum((size - 1) * step for step, _, size, _ in axes[: count - 1])
        most = sum((size - 1) * step for step, size, _, _ in axes[: count - 1])
        first = max(1 - high_size, -((most - distance) // stride))
        last = min(low_size - 1, (distance + least) // stride)
        return any(
            is_sum(distance - d * stride, count - 1, same_block and not (is_block and d))
            for d in range(first, last + 1)
        )

    return is_sum(distance, len(axes), True)


def check_caches(key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor]) -> int:
    """Return the number of blocks of caches that belong together.

    Raises:
        ValueError: unless keys and values agree in all but the head size, and a block is nowhere
            another one too.
    """
    if len(key_caches) != len(value_caches):
        raise ValueError(f"{len(key_caches)} key caches, but {len(value_caches)} value caches")
    key = check_blocks("key_caches", key_caches)
    value = check_blocks("value_caches", value_caches)
    for what, ours, theirs in (
        ("shape", list(value.shape[:3]), list(key.shape[:3])),
        ("dtype", value.dtype, key.dtype),
        ("device", value.device, key.device),
    ):
        if ours != theirs:
            raise ValueError(f"value_caches have {what} {ours}, key_caches {theirs}")
    names = [f"{name}_caches[{i}]" for name in ("key", "value") for i in range(len(key_caches))]
    check_blocks_apart(names, [*key_caches, *value_caches])
    return key.shape[0]


def check_pairs(name: str, pairs: Pairs, num_sources: int, num_destinations: int) -> np.ndarray:
    """Return (source, destination) pairs as int64 [n, 2].

    Raises:
        ValueError: for another shape or dtype, ids out of range, or a destination given twice.
    """
    array = host_ids(name, pairs)
    if not array.size:
        array = array.reshape(0, 2)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"{name} has shape {list(array.shape)}; expected [num_pairs, 2]")
    check_range(f"{name} source", array[:, 0], num_sources)
    check_range(f"{name} destination", array[:, 1], num_destinations)
    check_distinct(f"{name} destination", array[:, 1])
    return array


def host_ids(name: str, ids: Pairs | Sequence[int]) -> np.ndarray:
    """Return block ids as an int64 array of the caller's shape.

    Raises:
        ValueError: if they are not integers.
    """
    array = ids.cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} is {array.dtype}; expected integers")
    return array.astype(np.int64)


def check_range(name: str, ids: np.ndarray, num_blocks: int) -> None:
    """Raise ValueError for the first id outside [0, num_blocks)."""
    outside = (ids < 0) | (ids >= num_blocks)
    if outside.any():
        raise ValueError(f"{name} {ids[outside.argmax()]} is outside [0, {num_blocks})")


def check_distinct(name: str, ids: np.ndarray) -> None:
    """Raise ValueError for an id that occurs twice."""
    distinct, counts = np.unique(ids, return_counts=True)
    if len(distinct) < len(ids):
        twice = distinct[counts.argmax()]
        raise ValueError(f"{name} {twice} occurs {counts.max()} times: its contents are ambiguous")


def offline_cases() -> Iterator[OfflineCase]:
    """Copies as they are launched for NHD caches, and for a layout that changes on the way."""
    for name, dtype in DTYPES.items():
        cache = torch.empty(4, 16, 8, 128, dtype=dtype)
        layers = [cache, cache]
        yield OfflineCase(
            "copy_blocks", name, lambda layers=layers: copy_blocks(layers, layers, [(0, 1)]), "nhd"
        )
    odd = torch.empty(4, 3, 1, 5, dtype=torch.float16)
    yield OfflineCase("copy_blocks", "fp16", lambda: copy_blocks([odd], [odd], [(0, 1)]), "d5")
    hnd, nhd = (
        torch.empty(4, 8, 16, 128, dtype=torch.float16).transpose(1, 2),
        torch.empty(4, 16, 8, 128, dtype=torch.float16),
    )
    yield OfflineCase(
        "copy_blocks",
        "fp16",
        lambda: CopyPlan([hnd], [nhd]).run(np.array([(0, 1)])),
        "hnd-to-nhd",
    )
