"""Every kernel compiled for GPUs that are not here, and what the machine code must keep to."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.launch import TARGETS
from kernels.offline import (
    DTYPES,
    INTEGER_VALUES,
    KERNEL_MODULES,
    OfflineCase,
    covering,
    format_table,
    main_loop,
    offline_cases,
    run_in_subprocess,
    spread,
)

ROOT = Path(__file__).resolve().parent.parent
TARGET_NAMES = list(TARGETS)


def run_python(code: str) -> str:
    """The output of `code` in a process where kernels can be compiled, and none can run."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_fits(reports: list) -> None:
    for report in reports:
        assert report.spilled_bytes == 0, report
        # B15: tiles chosen for one GPU overflowed another's shared memory.
        assert report.shared_bytes <= TARGETS[report.target].shared_memory, report
        assert 0 < report.registers <= 512, report


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_every_kernel_compiles(target: str) -> None:
    """C04, B15, B17: each kernel and cache dtype, integers at 1, 16 and 17, nothing spilled."""
    reports = run_in_subprocess("--target", target, "--integers", "covering")
    assert_fits(reports)
    compiled = {(report.kernel, report.dtype, report.integers) for report in reports}
    for case in offline_cases():
        if case.extra or not TARGETS[target].supports(DTYPES.get(case.dtype)):
            continue
        for integer in INTEGER_VALUES:
            assert (case.kernel, case.dtype, str(integer)) in compiled


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_other_sizes_with_every_option_compile(target: str) -> None:
    """Its share of the further cases on each; all: python -m kernels.offline --extra."""
    reports = run_in_subprocess("--target", target, "--extra", "--spread")
    share = spread([case for case in offline_cases() if case.extra], TARGETS[target])
    assert [(r.config, r.dtype) for r in reports] == [(case.config, case.dtype) for case in share]
    assert_fits(reports)


def test_every_further_case_compiles_for_a_gpu() -> None:
    """Twelve of them were compiled for none; the largest belong where memory is shortest."""
    cases = [case for case in offline_cases() if case.extra]
    shares = {
        name: [(case.config, case.dtype) for case in spread(cases, target)]
        for name, target in TARGETS.items()
        if target.backend == "cuda"
    }
    wanted = [(case.config, case.dtype) for case in cases]
    assert sorted(case for share in shares.values() for case in share) == sorted(wanted)
    tight = shares["sm_86"] + shares["sm_120"]
    for head_size in (256, 576):
        for config in ("decode", "prefill"):
            for dtype in ("bf16", "fp32"):
                assert (f"{config}-d{head_size}", dtype) in tight


def test_decode_budget() -> None:
    """Head size 128, 4 query heads a KV head, block size 16, bf16, sm_90."""
    arguments = ("--target", "sm_90", "--kernel", "paged_attention")
    (report,) = run_in_subprocess(*arguments, "--dtype", "bf16", "--config", "decode")
    assert report.spilled_bytes == 0
    assert report.shared_bytes < 48 * 1024
    assert report.instructions_per_token <= 28
    # All of K and V comes by asynchronous 16-byte loads: 32 lanes x 16 bytes an instruction.
    bytes_per_iteration = report.loop_async_16_bytes * report.num_warps * 32 * 16
    assert bytes_per_iteration == 64 * 2 * 128 * 2


def test_float32_products_are_exact() -> None:
    """B22: TF32 is Triton's default on NVIDIA and loses 13 bits; ieee uses no matrix unit there."""
    arguments = ("--target", "sm_90", "--kernel", "paged_attention")
    reports = run_in_subprocess(*arguments, "--dtype", "fp32", "--config", "decode")
    assert [report.matrix_instructions for report in reports] == [0]


COUNT_KEYS = """
import json, torch
from kernels.launch import TARGETS, record_launches
from kernels.merge_states import merge_states
from kernels.offline import compile_key
from kernels.paged_attention import paged_attention
from kernels.testing import attention_inputs
from kernels.write_kv import write_kv

target = TARGETS["sm_90"]
keys = {}

def count(name, call):
    with record_launches(target) as launches:
        call()
    for launch in launches:
        kernel = launch.kernel.__name__
        keys.setdefault(f"{name} {kernel}", set()).add(compile_key(launch, target))

def attend(inputs, **options):
    tensors = [getattr(inputs, name) for name in inputs.__dataclass_fields__]
    return lambda: paged_attention(*tensors, scale=inputs.scale, **options)

for num_seqs in (1, 2, 3, 8, 16, 17, 32):
    for length in (1, 2, 15, 16, 17, 255, 256, 1000, 2048):
        spare = 0 if length % 2 else 3
        inputs = attention_inputs([length] * num_seqs, [1] * num_seqs, spare_columns=spare)
        count("decode", attend(inputs, max_query_len=1, num_splits=1))
        count("decode without a hint", attend(inputs, num_splits=1))
        for splits in (2, 3, 16):
            count("split decode", attend(inputs, max_query_len=1, num_splits=splits))
        window = {"sliding_window": length, "softcap": 1.0 + length}
        count("windowed decode", attend(inputs, max_query_len=1, num_splits=1, **window))
        queries = [length] + [1] * (num_seqs - 1)
        odd = {"head_size": 40, "num_heads": 1, "num_kv_heads": 1}
        odd = attention_inputs([length] * num_seqs, [1] * num_seqs, **odd)
        count("odd split decode", attend(odd, max_query_len=1, num_splits=2))
        inputs = attention_inputs([length] * num_seqs, queries, spare_columns=spare)
        if length > 1:
            count("prefill", attend(inputs, num_splits=1))
        tokens = torch.zeros(num_seqs * length % 4099 + 1, 2, 64)
        cache = torch.zeros(num_seqs, 16, 2, 64)
        slots = torch.zeros(len(tokens), dtype=torch.int64)
        count("write", lambda: write_kv(tokens, tokens, cache, cache.clone(), slots))
        states = torch.zeros(num_seqs, length, 2, 64)
        count("merge", lambda: merge_states(states, states[..., 0].contiguous()))
print(json.dumps({name: len(found) for name, found in keys.items()}))
"""


def test_batches_and_lengths_never_recompile() -> None:
    """B17: sizes of 1 and multiples of 16 compiled separately, in service."""
    counts = json.loads(run_python(COUNT_KEYS))
    assert set(counts) == {
        "decode _paged_attention_kernel",
        "decode without a hint _paged_attention_kernel",
        "split decode _paged_attention_kernel",
        "split decode _merge_states_kernel",
        "odd split decode _paged_attention_kernel",
        "odd split decode _merge_states_kernel",
        "windowed decode _paged_attention_kernel",
        "prefill _paged_attention_kernel",
        "write _write_kv_kernel",
        "merge _merge_states_kernel",
    }
    assert set(counts.values()) == {1}, counts


def test_kernels_import_without_a_gpu() -> None:
    """C02: an autotuner asked for a driver at import. In 3 seconds of CPU time, torch included."""
    modules = ", ".join(f"kernels.{name}" for name in (*KERNEL_MODULES, "offline", "testing"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_python(f"import {modules}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0


def test_a_launch_without_a_gpu_says_what_to_do() -> None:
    """C02: "0 active drivers" told nobody what to do."""
    message = run_python(
        "import torch\n"
        "from kernels.merge_states import merge_states\n"
        "try:\n"
        "    merge_states(torch.zeros(2, 1, 1, 16), torch.zeros(2, 1, 1))\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert "TRITON_INTERPRET=1" in message
    assert "kernels.reference" in message


def test_nothing_is_autotuned() -> None:
    """B18: an autotuner runs a kernel many times on the real cache."""
    for case in offline_cases():
        source = (ROOT / "kernels" / f"{case.kernel}.py").resolve()
        assert not source.exists() or "autotune" not in source.read_text()


def test_covering_takes_every_case_and_every_integer() -> None:
    cases = [OfflineCase("k", "fp16", lambda: None, config) for config in ("a", "b", "c", "d", "e")]
    cases.append(OfflineCase("k", "fp32", lambda: None))
    chosen = list(covering(cases))
    assert {id(case) for case, _ in chosen} == set(map(id, cases))
    for dtype in ("fp16", "fp32"):
        assert {n for case, n in chosen if case.dtype == dtype} == set(INTEGER_VALUES)
    assert len(chosen) == 5 + 3


def test_main_loop_is_the_innermost_with_matrix_instructions() -> None:
    code = [
        (0x00, "S2R R0, SR_TID.X"),
        (0x10, "IADD3 R1, R1, 0x1, RZ"),
        (0x20, "LDG.E.128 R4, [R2.64]"),
        (0x30, "HMMA.16816.F32 R4, R8, R12, R4"),
        (0x40, "@P0 BRA 0x20"),
        (0x50, "@P1 BRA 0x10"),
        (0x60, "FADD R1, R1, R2"),
        (0x70, "FADD R1, R1, R2"),
        (0x80, "FADD R1, R1, R2"),
        (0x90, "@P0 BRA 0x60"),
        (0xA0, "@P0 BRA 0xc0"),
        (0xB0, "EXIT"),
    ]
    assert main_loop(code) == [text for _, text in code[2:5]]
    assert main_loop(code[6:]) == [text for _, text in code[6:10]]
    assert main_loop(code[10:]) == []


def test_table_aligns_numbers() -> None:
    table = format_table([{"kernel": "a", "n": 5}, {"kernel": "long", "n": None}])
    assert table.splitlines() == ["kernel  n", "a       5", "long    -"]
