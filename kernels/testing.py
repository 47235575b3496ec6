"""What kernel tests are made of: poisoned memory, an earned tolerance, a traffic meter, mutants."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from . import reference
from .launch import cdiv

# A value that no copy, write or count produces by chance.
SENTINEL = -77


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor that is all NaN, or all SENTINEL where the dtype has no NaN."""
    return poison_(torch.empty(*shape, dtype=dtype, device=device))


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` in place with NaN, or with SENTINEL (its low byte where it is unsigned)."""
    if tensor.dtype.is_floating_point:
        # Filling an fp8 tensor goes through a cast that some torch versions lack.
        nan = torch.full((), float("nan"), device=tensor.device)
        return tensor.copy_(nan.to(tensor.dtype))
    return tensor.fill_(SENTINEL if tensor.dtype.is_signed else SENTINEL % 256)


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """True where an element still holds what `poison_` wrote."""
    if tensor.dtype.is_floating_point:
        return tensor.float().isnan()
    return tensor == (SENTINEL if tensor.dtype.is_signed else SENTINEL % 256)


def poison_unread_slots_(
    cache: torch.Tensor,  # [num_blocks, block_size, ...]
    block_tables: torch.Tensor,  # [num_seqs, max_blocks]
    seq_lens: torch.Tensor,  # [num_seqs]
    first_read: torch.Tensor | None = None,  # [num_seqs], 0 if None
) -> torch.Tensor:
    """Fill with NaN, in place, every slot that holds no position in [first_read, seq_len)."""
    num_blocks, block_size = cache.shape[:2]
    unread = torch.ones(num_blocks, block_size, dtype=torch.bool, device=cache.device)
    for row, seq_len in enumerate(seq_lens.tolist()):
        start = 0 if first_read is None else int(first_read[row])
        position = torch.arange(start, seq_len, device=cache.device)
        unread[block_tables[row, position // block_size].long(), position % block_size] = False
    cache.view(torch.uint8)[unread] = (
        poisoned(1, dtype=cache.dtype, device=cache.device)
        .view(torch.uint8)
        .repeat(cache.shape[-1])
    )
    return cache


def assert_within_budget(
    actual: torch.Tensor,
    exact: torch.Tensor,
    eager: torch.Tensor,
    factor: float = 2.0,
) -> None:
    """Assert that `actual` is as near to the float64 result `exact` as low precision allows.

    The largest error may be `factor` times that of `eager`, the same formula in plain torch at the
    precision under test, plus a rounding of the result in its own dtype.
    """
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    assert exact.dtype == torch.float64
    got, want = actual.double(), exact
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite]), "an infinite value differs"
    assert got[~infinite].isfinite().all(), "NaN or inf where the reference is finite"
    if infinite.all():
        return
    error = (got - want)[~infinite].abs().max().item()
    earned = (eager.double() - want)[~infinite].abs().max().item()
    rounding = torch.finfo(actual.dtype).eps * want[~infinite].abs().max().item()
    budget = factor * earned + rounding
    assert error <= budget, f"error {error:.3g}, budget {budget:.3g} (eager {earned:.3g})"


@dataclass(frozen=True)
class AttentionInputs:
    """A ragged batch over a paged cache, drawn at random; every block table is a random scatter."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5


def attention_inputs(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    table_padding: int = -1,
    spare_columns: int = 2,
    device: torch.device | str = "cpu",
) -> AttentionInputs:
    """Inputs of `paged_attention` from randn; block-table entries past a length are padding.

    Block 0 belongs to no sequence: it is what a masked block-table entry reads as.
    """
    needed = [cdiv(length, block_size) for length in seq_lens]
    num_blocks = sum(needed) + 3
    shuffled = 1 + torch.randperm(num_blocks - 1, dtype=torch.int32)
    block_tables = torch.full((len(needed), max(needed) + spare_columns), table_padding)
    block_tables = block_tables.to(torch.int32)
    for row, (count, end) in enumerate(zip(needed, itertools.accumulate(needed), strict=True)):
        block_tables[row, :count] = shuffled[end - count : end]
    cache_shape = (num_blocks, block_size, num_kv_heads, head_size)
    key_cache, value_cache = (
        torch.randn(cache_shape).to(dtype).to(cache_dtype or dtype).to(device) for _ in range(2)
    )
    return AttentionInputs(
        torch.randn(sum(query_lens), num_heads, head_size).to(dtype).to(device),
        key_cache,
        value_cache,
        block_tables.to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=device),
    )


def check_attention(
    attention: Callable[..., Any],
    inputs: AttentionInputs,
    *,
    max_query_len: int | None = None,
    num_splits: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `attention` on poisoned memory and assert that it gives the reference's (out, lse).

    The output starts as NaN, and so does every slot of the caches that no query sees.
    """
    tables = (inputs.block_tables, inputs.seq_lens, inputs.query_start_loc)
    clean = (inputs.query, inputs.key_cache, inputs.value_cache)
    options = {"scale": inputs.scale, "return_lse": True, **options}
    exact_options = {
        name: value.double() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    exact_out, exact_lse = reference.paged_attention(
        *(tensor.double() for tensor in clean), *tables, **exact_options
    )
    eager_out, eager_lse = reference.paged_attention(*clean, *tables, **options)

    first_seen = None
    if options.get("sliding_window"):
        query_lens = inputs.query_start_loc.diff()
        first_seen = inputs.seq_lens - query_lens - options["sliding_window"] + 1
        first_seen = first_seen.clamp(min=0)
    caches = [
        poison_unread_slots_(cache.clone(), *tables[:2], first_seen)
        for cache in (inputs.key_cache, inputs.value_cache)
    ]
    out, lse = attention(
        inputs.query,
        *caches,
        *tables,
        out=poisoned(*inputs.query.shape, dtype=inputs.query.dtype, device=inputs.query.device),
        max_query_len=max_query_len,
        num_splits=num_splits,
        **options,
    )
    assert_within_budget(out, exact_out, eager_out)
    assert_within_budget(lse, exact_lse, eager_lse)
    return out, lse


@dataclass
class GuardedTensor:
    """A tensor in the middle of a larger storage whose other elements are poison."""

    tensor: torch.Tensor
    storage: torch.Tensor = field(repr=False)
    margin: int = 0

    def assert_guards_intact(self) -> None:
        """Assert that nothing was written before or after the tensor."""
        for guard in (self.storage[: self.margin], self.storage[-self.margin :]):
            assert is_poison(guard).all(), "a write outside the tensor"


def guarded(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", margin: int = 1024
) -> GuardedTensor:
    """A poisoned contiguous tensor with `margin` poisoned elements on both sides."""
    numel = int(np.prod(shape))
    storage = poisoned(numel + 2 * margin, dtype=dtype, device=device)
    return GuardedTensor(storage[margin : margin + numel].view(*shape), storage, margin)


@dataclass
class Traffic:
    """Bytes touched by unmasked lanes, by tensor name; `other_*` is memory that wasn't named."""

    read: dict[str, int]
    written: dict[str, int]
    other_read: int = 0
    other_written: int = 0


@contextmanager
def traffic_meter(**tensors: torch.Tensor) -> Iterator[Traffic]:
    """Count the bytes that interpreted kernels load from and store to each named tensor.

    A lane counts if its mask is true, as often as it loads: a byte that is loaded twice counts
    twice. Needs TRITON_INTERPRET=1 and CPU tensors, since it wraps the interpreter's builder.

        with traffic_meter(source=x, target=y) as traffic:
            copy(x, y)
        assert traffic.read["source"] == x.nbytes
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    spans = {name: _byte_span(tensor) for name, tensor in tensors.items()}
    traffic = Traffic(dict.fromkeys(tensors, 0), dict.fromkeys(tensors, 0))

    def count(pointers: Any, mask: Any, counts: dict[str, int]) -> int:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        lanes = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.shape))
        addresses = lanes[np.broadcast_to(mask, lanes.shape)]
        named = 0
        for name, (start, end) in spans.items():
            inside = int(((addresses >= start) & (addresses < end)).sum())
            counts[name] += inside * size
            named += inside
        return (addresses.size - named) * size

    def mask_of(pointers: Any, mask: Any) -> np.ndarray:
        return np.ones_like(pointers.data, dtype=bool) if mask is None else mask.data.astype(bool)

    wrapped = {}

    def wrap(method: str, reads: bool, writes: bool, mask_at: int | None) -> None:
        original = wrapped[method] = getattr(builder, method)

        def metered(*args: Any) -> Any:
            pointers = args[1] if method == "create_atomic_rmw" else args[0]
            mask = mask_of(pointers, None if mask_at is None else args[mask_at])
            if reads:
                traffic.other_read += count(pointers, mask, traffic.read)
            if writes:
                traffic.other_written += count(pointers, mask, traffic.written)
            return original(*args)

        setattr(builder, method, metered)

    # The unmasked forms call these two, so each access passes here once.
    wrap("create_masked_load", True, False, 1)
    wrap("create_masked_store", False, True, 2)
    wrap("create_atomic_rmw", True, True, 3)
    wrap("create_atomic_cas", True, True, None)
    try:
        yield traffic
    finally:
        for method in wrapped:
            delattr(builder, method)


def _byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the tensor's first to just past its last element."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size() if tensor.numel() else start


_mutant_numbers = itertools.count()


@contextmanager
def mutant(module: ModuleType, old: str, new: str) -> Iterator[ModuleType]:
    """A copy of `module` in whose source the one occurrence of `old` is replaced by `new`."""
    source = Path(module.__file__).read_text()
    if source.count(old) != 1:
        raise ValueError(f"{old!r} occurs {source.count(old)} times in {module.__name__}")
    name = f"{module.__package__}._mutant_{next(_mutant_numbers)}"
    with tempfile.TemporaryDirectory() as folder:
        # Triton reads a kernel's source from its file, so the mutant has to be one.
        path = Path(folder, "mutant.py")
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location(name, path)
        copy = importlib.util.module_from_spec(spec)
        sys.modules[name] = copy
        try:
            spec.loader.exec_module(copy)
            yield copy
        finally:
            del sys.modules[name]
