"""What can be measured: every implementation's answers, what checks catch, and what is absent.

Libraries that are not here are stood in for by fakes of the same signatures that compute with
`kernels.reference`, so that a wrong argument gives a wrong answer.
"""

import dataclasses
import itertools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.bench.config import (
    CacheDtype,
    CopyConfig,
    DecodeConfig,
    Direction,
    Dtype,
    GatherConfig,
    HashConfig,
    MatchConfig,
    MatchGatherConfig,
    MergeConfig,
    OperationConfig,
    PrefillConfig,
    SwapConfig,
    WriteConfig,
)
from experiments.bench.implementations import NAMES, find_implementation
from experiments.bench.implementations.flex_attention import (
    QUERY_TILE,
    kernel_options,
    make_block_mask,
)
from experiments.bench.operations import make_operation, operation_of
from experiments.bench.operations.operation import Operation, WrongAnswerError
from experiments.ranges import ConfigError
from experiments.results import AbsentError
from kernels import reference
from kernels.testing import poison_

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CPU = torch.device("cpu")
HEADS = {"num_kv_heads": 2, "head_size": 24, "block_size": 4}
GROUPED = {"num_heads": 4, "num_kv_heads": 1, "head_size": 16, "batch_size": 2}
SINGLE = {"num_heads": 2, "num_kv_heads": 2, "head_size": 24, "batch_size": 3}

DECODES = {
    "decode-gqa4-bs16-bf16": DecodeConfig(**GROUPED, block_size=16, context_len=37),
    "decode-gqa1-bs4-fp16": DecodeConfig(**SINGLE, block_size=4, dtype=Dtype.fp16, context_len=9),
    "decode-gqa4-bs48-fp32-w20": DecodeConfig(
        **GROUPED, block_size=48, dtype=Dtype.fp32, context_len=97, sliding_window=20
    ),
    "decode-gqa1-bs16-bf16-w16": DecodeConfig(
        **SINGLE, block_size=16, context_len=64, sliding_window=16
    ),
    "decode-gqa4-bs16-e4m3": DecodeConfig(
        **GROUPED, block_size=16, cache_dtype=CacheDtype.fp8e4m3, context_len=33
    ),
    "decode-one-token": DecodeConfig(**GROUPED, block_size=16, context_len=1),
}
PREFILLS = {
    "prefill-gqa4-bs16-fp16": PrefillConfig(
        **GROUPED, block_size=16, dtype=Dtype.fp16, prompt_len=16
    ),
    "prefill-gqa1-bs4-fp32": PrefillConfig(**SINGLE, block_size=4, dtype=Dtype.fp32, prompt_len=21),
    "prefill-gqa4-bs16-bf16-cached": PrefillConfig(
        **GROUPED, block_size=16, prompt_len=41, cached_len=29
    ),
    "prefill-gqa4-bs48-fp32-cached": PrefillConfig(
        **GROUPED, block_size=48, dtype=Dtype.fp32, prompt_len=60, cached_len=48
    ),
    "prefill-gqa4-bs16-bf16-w5": PrefillConfig(
        **GROUPED, block_size=16, prompt_len=16, sliding_window=5
    ),
    "prefill-gqa1-bs16-fp16-w9-cached": PrefillConfig(
        **SINGLE, block_size=16, dtype=Dtype.fp16, prompt_len=50, cached_len=37, sliding_window=9
    ),
    "prefill-gqa4-bs4-w99-cached": PrefillConfig(
        **GROUPED, block_size=4, prompt_len=23, cached_len=10, sliding_window=99
    ),
    "prefill-gqa1-bs16-e5m2-cached": PrefillConfig(
        **SINGLE, block_size=16, cache_dtype=CacheDtype.fp8e5m2, prompt_len=30, cached_len=12
    ),
    "prefill-one-query": PrefillConfig(**GROUPED, block_size=16, prompt_len=20, cached_len=19),
}
OTHERS = {
    "merge-bf16": MergeConfig(num_states=3, num_tokens=4, num_heads=2, head_size=24),
    "merge-fp32-one-state": MergeConfig(
        num_states=1, num_tokens=3, num_heads=2, head_size=16, dtype=Dtype.fp32
    ),
    "write-bs4-bf16": WriteConfig(**HEADS, num_tokens=7),
    "write-bs48-fp16-e4m3": WriteConfig(
        num_kv_heads=2,
        head_size=16,
        block_size=48,
        dtype=Dtype.fp16,
        cache_dtype=CacheDtype.fp8e4m3,
        num_tokens=5,
    ),
    "write-bs16-bf16-e5m2": WriteConfig(
        num_kv_heads=1,
        head_size=16,
        block_size=16,
        cache_dtype=CacheDtype.fp8e5m2,
        num_tokens=6,
    ),
    "copy-fanout3": CopyConfig(**HEADS, num_layers=2, num_sources=2, fanout=3),
    "gather": GatherConfig(**HEADS, num_layers=2, num_blocks=3, dtype=Dtype.fp32),
    **{
        f"swap-{direction.name}": SwapConfig(
            **HEADS, num_layers=2, num_blocks=3, direction=direction
        )
        for direction in Direction
    },
    "hash-bs16": HashConfig(num_prompts=2, prompt_len=49, block_size=16),
    "hash-bs5": HashConfig(num_prompts=3, prompt_len=31, block_size=5),
    "match-bs4": MatchConfig(num_prompts=2, prompt_len=21, block_size=4, cached_len=12),
    "match-all-but-one": MatchConfig(num_prompts=2, prompt_len=17, block_size=4, cached_len=16),
    "match-gather": MatchGatherConfig(
        **HEADS, num_prompts=2, prompt_len=21, cached_len=12, num_layers=1
    ),
}
CASES = DECODES | PREFILLS | OTHERS
HERE = ("prefixlab", "torch_ops", "flex_attention", "host")
MOVES = ["copy-fanout3", "gather", "swap-to_host", "swap-from_host"]
ONE_EACH = [
    *("decode-gqa4-bs16-bf16", "prefill-gqa4-bs16-bf16-cached", "merge-bf16", "write-bs4-bf16"),
    *(*MOVES, "hash-bs16", "match-bs4", "match-gather"),
]


def answerable(name: str, config: OperationConfig) -> bool:
    kinds = find_implementation(name).prepares
    too_small = name == "flex_attention" and getattr(config, "block_size", 16) < 16
    return operation_of(config).kind in kinds and not too_small


def drawn(config: OperationConfig) -> Operation:
    return make_operation(operation_of(config).reduced(config), CPU, seed=3)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case}")
        for name in HERE
        for case, config in CASES.items()
        if answerable(name, config)
    ],
)
def test_answers_are_right(name: str, case: str) -> None:
    """Twice, on poisoned outputs, as inputs are shared between implementations."""
    op = drawn(CASES[case])
    call = find_implementation(name).prepare(op)
    for _ in range(2):
        op.poison()
        op.check(call())


# --------------------------------------------------------------------------------------------------
# What the checks catch
# --------------------------------------------------------------------------------------------------


def written(op: Operation, answer: object) -> list[torch.Tensor]:
    """The tensors that hold an answer."""
    if hasattr(op, "destinations"):
        return op.destinations
    if op.kind == "write_kv":
        return [op.key_cache, op.value_cache]
    tensors = list(answer) if isinstance(answer, tuple) else [answer]
    return [t for entry in tensors for t in (entry if isinstance(entry, list) else [entry])]


def moved_rows(op: Operation, tensor: torch.Tensor) -> list[int]:
    """Two rows of a tensor that are part of the answer, and differ."""
    if hasattr(op, "destinations"):
        # The first and the last: of another source, also where sources are copied several times.
        return [int(op.pairs[0, 1]), int(op.pairs[-1, 1])]
    if op.kind == "write_kv":
        blocks = op.slot_mapping // op.config.block_size
        return [int(blocks[0]), int(blocks[blocks != blocks[0]][0])]
    return [0, len(tensor) - 1]


def perturb(op: Operation, tensor: torch.Tensor) -> None:
    row = tensor[moved_rows(op, tensor)[0]]
    if op.kind == "write_kv":
        row = row[op.slot_mapping[0] % op.config.block_size]
    element = row.view(-1)[:1] if row.dim() else tensor[:1]
    element += 1 if not element.is_floating_point() else 0.5


def swap_rows(op: Operation, tensor: torch.Tensor) -> None:
    a, b = moved_rows(op, tensor)
    tensor[[a, b]] = tensor[[b, a]]


def forget(op: Operation, tensor: torch.Tensor) -> None:
    for row in moved_rows(op, tensor):
        tensor[row] = poison_(torch.empty_like(tensor[row]))


def zero(op: Operation, tensor: torch.Tensor) -> None:
    for row in moved_rows(op, tensor):
        tensor[row] = 0


@pytest.mark.parametrize("case", ONE_EACH)
@pytest.mark.parametrize("spoil", [perturb, swap_rows, forget, zero])
def test_checks_catch_wrong_answers(spoil, case: str) -> None:
    """In every tensor of the answer, one at a time."""
    op = drawn(CASES[case])
    call = find_implementation("prefixlab").prepare(op)
    count = len(written(op, call()))
    for index in range(count):
        op.poison()
        answer = call()
        tensor = written(op, answer)[index]
        before = tensor.clone()
        spoil(op, tensor)
        if torch.equal(tensor, before):  # all prompts' matched lengths are equal
            assert (case[:5], spoil) == ("match", swap_rows)
            continue
        with pytest.raises(WrongAnswerError):
            op.check(answer)
        # What was moved lies among what is moved from.
        tensor.copy_(before)
        op.check(answer)


@pytest.mark.parametrize("case", ["write-bs4-bf16", "write-bs48-fp16-e4m3"])
def test_writing_one_more_slot_is_caught(case: str) -> None:
    op = drawn(CASES[case])
    find_implementation("torch_ops").prepare(op)()
    op.check(None)
    slots = op.value_cache.view(-1, *op.value_cache.shape[2:])
    free = next(slot for slot in range(len(slots)) if slot not in op.slot_mapping)
    slots.view(torch.uint8)[free, -1, -1] = 0
    with pytest.raises(WrongAnswerError, match="elsewhere"):
        op.check(None)


@pytest.mark.parametrize("case", MOVES)
def test_moving_blocks_the_wrong_way_is_caught(case: str) -> None:
    """Source and destination are alike then, too."""
    op = drawn(CASES[case])
    op.poison()
    for source, destination in zip(op.sources, op.destinations, strict=True):
        for from_block, to_block in op.pairs.tolist():
            source[from_block] = destination[to_block]
    with pytest.raises(WrongAnswerError, match="nothing was to be moved to"):
        op.check(None)


@pytest.mark.parametrize("case", ["copy-fanout3", "swap-from_host"])
def test_moving_one_block_more_is_caught(case: str) -> None:
    op = drawn(CASES[case])
    find_implementation("torch_ops").prepare(op)()
    op.check(None)
    other = next(block for block in range(len(op.destinations[0])) if block not in op.pairs)
    op.destinations[-1][other, -1, -1, -1] += 1
    with pytest.raises(WrongAnswerError, match="nothing was to be moved to"):
        op.check(None)


def test_fewer_prompts_are_caught() -> None:
    op = drawn(CASES["match-bs4"])
    with pytest.raises(WrongAnswerError, match="0 prompts"):
        op.check([])


@pytest.mark.parametrize("case", ["hash-bs16", "match-bs4"])
def test_wrong_answers_of_the_host_are_caught(case: str) -> None:
    op = drawn(CASES[case])
    call = find_implementation("host").prepare(op)
    op.check(call())
    answer = call()
    answer[-1][-1] += 1
    with pytest.raises(WrongAnswerError):
        op.check(answer)


@pytest.mark.parametrize("case", ["decode-gqa4-bs16-bf16", "hash-bs16"])
def test_answers_of_another_shape_are_caught(case: str) -> None:
    op = drawn(CASES[case])
    answer = find_implementation("torch_ops").prepare(op)()
    with pytest.raises(WrongAnswerError, match="shape"):
        op.check(answer[:1])


# --------------------------------------------------------------------------------------------------
# What is absent
# --------------------------------------------------------------------------------------------------


def test_every_file_is_an_implementation_that_needs_no_library_to_be_read() -> None:
    assert set(HERE) | {"flashinfer", "vllm", "flash_attn"} <= set(NAMES)
    for name in NAMES:
        assert find_implementation(name).name == name


def test_an_unknown_implementation_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError) as caught:
        find_implementation("flashmla")
    assert all(name in str(caught.value) for name in ["flashmla", *NAMES])


@pytest.mark.parametrize("name", ["flashinfer", "vllm", "flash_attn"])
def test_a_library_that_is_not_installed_is_absent(name: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(AbsentError, match=f"{name} is not installed"):
        find_implementation(name).demand("attention")
    with pytest.raises(AbsentError, match=f"{name} is not installed"):
        find_implementation(name).prepare(drawn(CASES["decode-gqa4-bs16-bf16"]))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("host", "attention"),
        ("torch_ops", "match_prefix"),
        ("flex_attention", "write_kv"),
        ("vllm", "merge_states"),
    ],
)
def test_an_operation_that_is_not_offered_is_absent(name: str, kind: str) -> None:
    with pytest.raises(AbsentError, match=f"{name} has no {kind}"):
        find_implementation(name).demand(kind)


SMALL = {"batch_size": 1, "num_heads": 1, "num_kv_heads": 1, "context_len": 5}
LACKS = [
    ("flex_attention", {"block_size": 8}, "block sizes divisible by 16.* not 8"),
    ("flex_attention", {"block_size": 24}, "not 24"),
    ("flex_attention", {"head_size": 8}, "head size of 16"),
    ("flashinfer", {"dtype": Dtype.fp32}, "fp32"),
    ("flashinfer", {"head_size": 96}, "head size of 64, 128 or 256, not 96"),
    ("vllm", {"dtype": Dtype.fp32}, "fp32"),
    ("vllm", {"cache_dtype": CacheDtype.fp8e4m3}, "fp8"),
    ("vllm", {"head_size": 264}, "not 264"),
    ("vllm", {"head_size": 60}, "not 60"),
    ("vllm", {"block_size": 8}, "block sizes divisible by 16, not 8"),
    ("flash_attn", {"dtype": Dtype.fp32}, "fp32"),
    ("flash_attn", {"cache_dtype": CacheDtype.fp8e5m2}, "fp8"),
    ("flash_attn", {"head_size": 320}, "not 320"),
    ("flash_attn", {"block_size": 128}, "block sizes divisible by 256, not 128"),
]


@pytest.mark.parametrize(("name", "options", "message"), LACKS)
def test_what_a_library_lacks_is_said(name, options, message, monkeypatch) -> None:
    """Before anything of the library is called: the module that stands in for it is empty."""
    monkeypatch.setitem(sys.modules, name, module(name))
    op = drawn(DecodeConfig(**SMALL, **options))
    with pytest.raises(AbsentError, match=f"{name} .*{message}"):
        find_implementation(name).prepare(op)


# --------------------------------------------------------------------------------------------------
# torch
# --------------------------------------------------------------------------------------------------


class NoHostTrips(TorchDispatchMode):
    """Refuses what a CUDA graph can't hold: values read by the host, or sent by it."""

    REFUSED = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.REFUSED, name
        for index in args[1] if name in ("index", "index_put_") else []:
            assert index is None or index.dtype != torch.bool, "a mask of unknown count"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", [case for case in CASES if answerable("torch_ops", CASES[case])])
def test_torch_calls_can_be_captured(case: str) -> None:
    call = find_implementation("torch_ops").prepare(drawn(CASES[case]))
    with NoHostTrips():
        call()


def test_host_trips_are_noticed() -> None:
    with pytest.raises(AssertionError, match="lift_fresh"), NoHostTrips():
        torch.ones(3) / torch.tensor([0.5])
    with pytest.raises(AssertionError, match="mask"), NoHostTrips():
        torch.ones(3)[torch.ones(3) > 0]


# --------------------------------------------------------------------------------------------------
# flex_attention: its kernels read lists of blocks, which without a GPU nothing reads
# --------------------------------------------------------------------------------------------------

TILED = {
    "two-tiles": PrefillConfig(**GROUPED, block_size=16, prompt_len=200),
    "two-tiles-cached": PrefillConfig(**GROUPED, block_size=48, prompt_len=260, cached_len=77),
    "two-tiles-window": PrefillConfig(
        **GROUPED, block_size=16, prompt_len=300, cached_len=140, sliding_window=150
    ),
    "narrow-window": PrefillConfig(
        **SINGLE, block_size=16, prompt_len=200, cached_len=60, sliding_window=17
    ),
}


def attend_by_block_lists(op: Operation) -> torch.Tensor:
    """As the kernels do: of each tile's listed blocks, only those seen in part are masked."""
    mask, block_size = make_block_mask(op), op.config.block_size
    group = op.config.num_heads // op.config.num_kv_heads
    keys, values = (
        cache.flatten(0, 1).repeat_interleave(group, dim=1).double()
        for cache in (op.key_cache, op.value_cache)
    )
    out = torch.empty_like(op.query)
    for seq in range(op.config.batch_size):
        for start in range(0, op.query_len, QUERY_TILE):
            tile = start // QUERY_TILE
            queries = torch.arange(start, min(start + QUERY_TILE, op.query_len))
            slots, visible = [], []
            for counts, lists in (
                (mask.kv_num_blocks, mask.kv_indices),
                (mask.full_kv_num_blocks, mask.full_kv_indices),
            ):
                if counts is None:
                    continue
                assert counts.dtype == lists.dtype == torch.int32
                assert counts.is_contiguous()
                assert lists.is_contiguous()
                blocks = lists[seq, 0, tile, : counts[seq, 0, tile]].long()
                these = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
                slots.append(these)
                seen = mask.mask_mod(torch.tensor(seq), None, queries[:, None], these[None])
                if lists is mask.full_kv_indices:
                    assert seen.all()
                visible.append(seen)
            slots, visible = torch.cat(slots), torch.cat(visible, dim=1)
            rows = slice(seq * op.query_len + start, seq * op.query_len + start + len(queries))
            scores = torch.einsum("qhd,khd->hqk", op.query[rows].double(), keys[slots]) * op.scale
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values[slots]).to(out.dtype)
    return out


@pytest.mark.parametrize("case", [*TILED, "decode-gqa4-bs16-bf16", "decode-gqa1-bs16-bf16-w16"])
def test_block_lists_hold_every_visible_block_and_no_other(case: str) -> None:
    op = make_operation((TILED | DECODES)[case], CPU, seed=5)
    op.check(attend_by_block_lists(op))
    mask = make_block_mask(op)
    listed = mask.kv_num_blocks.clone()
    if mask.full_kv_num_blocks is not None:
        listed += mask.full_kv_num_blocks
    window = op.config.sliding_window or op.seq_len
    for tile in range(listed.shape[-1]):
        first = op.seq_len - op.query_len + tile * QUERY_TILE
        last = min(first + QUERY_TILE, op.seq_len) - 1
        first_block = max(0, first - window + 1) // op.config.block_size
        wanted = last // op.config.block_size - first_block + 1
        assert (listed[..., tile] == wanted).all()


def test_most_blocks_of_a_long_prefill_need_no_mask() -> None:
    """They are the ones before the tile's own."""
    mask = make_block_mask(make_operation(TILED["two-tiles"], CPU, seed=5))
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 8]
    assert mask.kv_num_blocks[0, 0].tolist() == [8, 5]


def test_decode_lists_all_blocks_as_partly_seen() -> None:
    assert make_block_mask(drawn(DECODES["decode-gqa4-bs16-bf16"])).full_kv_num_blocks is None


@pytest.mark.parametrize(
    ("block_size", "tile"), [(16, 16), (48, 16), (32, 32), (96, 32), (192, 64), (128, None)]
)
@pytest.mark.parametrize("prefill", [False, True])
def test_tiles_of_keys_divide_blocks(block_size: int, tile: int | None, prefill: bool) -> None:
    config = DecodeConfig(**SMALL, block_size=block_size)
    if prefill:
        sizes = {key: SMALL[key] for key in SMALL if key != "context_len"}
        config = PrefillConfig(**sizes, block_size=block_size, prompt_len=5)
    options = kernel_options(drawn(config))
    assert options.get("BLOCK_N") == tile
    assert ("BACKEND" in options) == (prefill or block_size == 96)


# --------------------------------------------------------------------------------------------------
# Libraries that are not here
# --------------------------------------------------------------------------------------------------


def module(name: str, **contents: object) -> ModuleType:
    fake = ModuleType(name)
    fake.__spec__ = ModuleSpec(name, None)
    vars(fake).update(contents)
    return fake


def window_of(left: int) -> int | None:
    assert left >= -1
    return None if left == -1 else left + 1


def check_int32(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def attend(q, k, v, block_table, seq_lens, starts, scale, causal, window) -> torch.Tensor:
    check_int32(block_table, seq_lens, starts)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return reference.paged_attention(
        q, k, v, block_table, seq_lens, starts, scale=scale, causal=causal, sliding_window=window
    )


class FakeWrapper:
    """What FlashInfer's two wrappers share, in the mode that CUDA graphs need."""

    def begin(self, workspace, kv_layout, use_cuda_graph, buffers, backend) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= 128 * 2**20
        assert not workspace[:1000].any()
        assert kv_layout == "NHD"
        assert use_cuda_graph
        check_int32(*buffers)
        self.buffers, self.backend, self.planned = buffers, backend, None

    def set_plan(self, starts, indptr, indices, last_page_len, page_size, **planned) -> None:
        """The buffers are what a captured graph reads; copies have to fit."""
        for buffer, given in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
            check_int32(given)
            assert len(given) <= len(buffer)
            buffer[: len(given)].copy_(given)
        assert (last_page_len >= 1).all()
        assert (last_page_len <= page_size).all()
        self.starts, self.page_size, self.planned = starts, page_size, planned

    def attend(self, q, paged_kv_cache, out) -> torch.Tensor:
        key, value = paged_kv_cache
        planned = self.planned
        assert q.dtype == planned["q_data_type"]
        assert key.dtype == value.dtype == (planned["kv_data_type"] or q.dtype)
        if key.dtype != q.dtype:
            assert self.backend == "fa2"
        assert q.shape[1:] == (planned["num_qo_heads"], planned["head_dim"])
        assert key.shape[1:] == (self.page_size, planned["num_kv_heads"], planned["head_dim"])
        indptr, indices, last_page_len = self.buffers
        pages = indptr.diff()
        table = torch.full((len(pages), int(pages.max())), -1, dtype=torch.int32)
        for row, (start, end) in enumerate(itertools.pairwise(indptr)):
            table[row, : end - start] = indices[start:end]
        seq_lens = (pages - 1) * self.page_size + last_page_len
        window = window_of(planned["window_left"])
        options = (planned["sm_scale"], planned["causal"], window)
        result = attend(q, key, value, table, seq_lens, self.starts, *options)
        if out is None:
            return result
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        return out.copy_(result)


class FakeDecodeWrapper(FakeWrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self.begin(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, backend)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
    ):
        assert self.use_tensor_cores == (num_qo_heads // num_kv_heads >= 4)
        self.set_plan(
            torch.arange(len(indptr), dtype=torch.int32),
            *(indptr, indices, last_page_len, page_size),
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
            causal=False,
        )

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        return self.attend(q, paged_kv_cache, out)


class FakePrefillWrapper(FakeWrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
    ):
        buffers = paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        self.begin(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, backend)
        check_int32(qo_indptr_buf)
        self.qo_indptr_buf = qo_indptr_buf

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        self.qo_indptr_buf.copy_(qo_indptr)
        self.set_plan(
            self.qo_indptr_buf,
            *(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size),
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
            causal=causal,
        )

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
    ):
        return self.attend(q, paged_kv_cache, out)


@pytest.fixture
def flashinfer(monkeypatch):
    fake = module(
        "flashinfer",
        BatchDecodeWithPagedKVCacheWrapper=FakeDecodeWrapper,
        BatchPrefillWithPagedKVCacheWrapper=FakePrefillWrapper,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)


def fake_schedule(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    cache_leftpad=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """Equal for the calls that one schedule is right for."""
    return (
        *(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim),
        *(tuple(cache_seqlens.tolist()), tuple(cu_seqlens_q.tolist()), qkv_dtype, page_size),
        *(causal, tuple(window_size)),
    )


class FakeVllm:
    def __init__(self) -> None:
        self.version = None

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k=None,
        seqused_k=None,
        q_v=None,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=None,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
        return_softmax_lse=False,
        out=None,
        scheduler_metadata=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        num_splits=0,
        fa_version=2,
        s_aux=None,
        cp_world_size=1,
        cp_rank=0,
        cp_tot_seqused_k=None,
    ):
        assert cu_seqlens_k is None
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert max_seqlen_k == int(seqused_k.max())
        assert k.shape[1] % 16 == 0
        assert k.dtype == v.dtype == q.dtype
        left, right = (-1, -1) if window_size is None else window_size
        assert right == (-1 if left == -1 else 0)
        self.version = fa_version
        schedule = fake_schedule(
            *(len(seqused_k), max_seqlen_q, max_seqlen_k, q.shape[1], k.shape[2], q.shape[2]),
            seqused_k,
            q.dtype,
            cu_seqlens_q=cu_seqlens_q,
            page_size=k.shape[1],
            causal=causal,
            window_size=(left, right),
        )
        assert scheduler_metadata == (schedule if fa_version == 3 else None)
        window = window_of(left)
        options = (softmax_scale, causal, window)
        return out.copy_(attend(q, k, v, block_table, seqused_k, cu_seqlens_q, *options))


@pytest.fixture
def vllm(monkeypatch) -> FakeVllm:
    """On an H100 unless the test says otherwise."""
    fake = FakeVllm()
    inner = module(
        "vllm.vllm_flash_attn",
        flash_attn_varlen_func=fake.flash_attn_varlen_func,
        get_scheduler_metadata=fake_schedule,
        is_fa_version_supported=lambda fa_version: True,
    )
    monkeypatch.setitem(sys.modules, "vllm", module("vllm", vllm_flash_attn=inner))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", inner)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    return fake


def fake_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    check_int32(cu_seqlens_k)
    seq_lens = cu_seqlens_k.diff()
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(seq_lens.max())
    assert k.shape[1] % 256 == 0
    assert window_size[1] == (-1 if window_size[0] == -1 else 0)
    options = (softmax_scale, causal, window_of(window_size[0]))
    return attend(q, k, v, block_table, seq_lens, cu_seqlens_q, *options)


def fake_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    assert k is None
    assert v is None
    assert k_cache.shape[1] % 256 == 0
    assert window_size[1] == (-1 if window_size[0] == -1 else 0)
    batch, query_len = q.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32) * query_len
    options = (softmax_scale, causal, window_of(window_size[0]))
    out = attend(q.flatten(0, 1), k_cache, v_cache, block_table, cache_seqlens, starts, *options)
    return out.unflatten(0, (batch, query_len))


@pytest.fixture
def flash_attn(monkeypatch):
    fake = module(
        "flash_attn",
        flash_attn_varlen_func=fake_varlen_func,
        flash_attn_with_kvcache=fake_with_kvcache,
    )
    monkeypatch.setitem(sys.modules, "flash_attn", fake)


LIBRARY_CASES = ["decode", "decode-window", "prefill", "prefill-cached", "prefill-window"]


def library_config(case: str, block_size: int, group: int) -> OperationConfig:
    shape = {
        "batch_size": 2,
        "num_heads": 2 * group,
        "num_kv_heads": 2,
        "head_size": 64,
        "block_size": block_size,
        "sliding_window": 20 if "window" in case else None,
    }
    if case.startswith("decode"):
        return DecodeConfig(**shape, dtype=Dtype.fp16, context_len=block_size + 37)
    cached_len = 0 if case == "prefill" else block_size + 5
    return PrefillConfig(**shape, prompt_len=cached_len + 13, cached_len=cached_len)


def check_library(name: str, config: OperationConfig) -> Operation:
    op = drawn(config)
    find_implementation(name).demand(op.kind)
    call = find_implementation(name).prepare(op)
    for _ in range(2):
        op.poison()
        op.check(call())
    return op


@pytest.mark.parametrize("case", LIBRARY_CASES)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("cache_dtype", [CacheDtype.auto, CacheDtype.fp8e4m3])
def test_flashinfer(case: str, group: int, cache_dtype: CacheDtype, flashinfer) -> None:
    config = library_config(case, 16, group)
    check_library("flashinfer", dataclasses.replace(config, cache_dtype=cache_dtype))


def test_flashinfer_with_a_full_last_page(flashinfer) -> None:
    config = library_config("decode", 16, 4)
    check_library("flashinfer", dataclasses.replace(config, context_len=48))


@pytest.mark.parametrize("case", LIBRARY_CASES)
@pytest.mark.parametrize("group", [1, 4])
def test_vllm(case: str, group: int, vllm: FakeVllm) -> None:
    check_library("vllm", library_config(case, 16, group))


@pytest.mark.parametrize(
    ("capability", "head_size", "version"),
    [((8, 0), 64, 2), ((9, 0), 64, 3), ((10, 0), 64, 4), ((10, 0), 192, 2), ((12, 0), 64, 2)],
)
def test_vllm_takes_the_version_for_the_gpu(
    capability, head_size, version, vllm: FakeVllm, monkeypatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    config = dataclasses.replace(library_config("decode", 16, 4), head_size=head_size)
    check_library("vllm", config)
    assert vllm.version == version


def test_vllm_falls_back_to_version_2(vllm: FakeVllm, monkeypatch) -> None:
    fake = sys.modules["vllm.vllm_flash_attn"]
    monkeypatch.setattr(fake, "is_fa_version_supported", lambda fa_version: fa_version == 2)
    check_library("vllm", library_config("decode", 16, 4))
    assert vllm.version == 2


@pytest.mark.parametrize("case", LIBRARY_CASES)
@pytest.mark.parametrize("group", [1, 4])
def test_flash_attn(case: str, group: int, flash_attn) -> None:
    check_library("flash_attn", library_config(case, 256, group))
