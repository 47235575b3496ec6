"""Compiling every kernel for GPUs that are not here, and reading what came out.

Each kernel module has `offline_cases()`, which calls its own launcher on small tensors; those
launches are recorded, not made, and compiled for a named target. The report comes from the machine
code: registers, spilled bytes, shared memory, 16-byte loads, matrix instructions and the length of
the main loop.

    python -m kernels.offline                       every kernel, target and dtype
    python -m kernels.offline --target sm_90 --kernel paged_attention --dtype bf16
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from .launch import TARGETS, Launch, Target, is_interpreted, record_launches

KERNEL_MODULES = (
    "merge_states",
    "paged_attention",
    "write_kv",
    "copy_blocks",
    "gather_blocks",
    "prefix_hash",
)

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8e4m3": torch.float8_e4m3fn,
    "fp8e5m2": torch.float8_e5m2,
}
CASE_DTYPES = {**DTYPES, "int32": torch.int32}

# What an integer argument may be to Triton's specialisation: equal to 1, divisible by 16, neither.
INTEGER_VALUES = (1, 16, 17)


@dataclass(frozen=True)
class OfflineCase:
    """A call of a launcher that compiles one or more kernels.

    `dtype` is a key of CASE_DTYPES: the cache's, or the data's where there is no cache.
    `extra` cases are more sizes and options of a kernel that other cases compile already; `large`
    ones of these need the most shared memory.
    `tokens_argument` names the constexpr that says how many KV tokens one turn of the main loop
    handles.
    """

    kernel: str
    dtype: str
    run: Callable[[], Any]
    config: str = ""
    tokens_argument: str | None = None
    extra: bool = False
    large: bool = False


@dataclass(frozen=True)
class Report:
    """What one compiled kernel uses. Counts of instructions are warp instructions in the SASS."""

    kernel: str
    config: str
    dtype: str
    target: str
    integers: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    loads_16_bytes: int = 0
    async_16_bytes: int = 0
    matrix_instructions: int = 0
    loop_instructions: int = 0
    loop_async_16_bytes: int = 0
    loop_matrix_instructions: int = 0
    num_warps: int = 0
    instructions_per_token: float | None = None


def offline_cases(kernel: str = "", dtype: str = "", config: str = "") -> Iterator[OfflineCase]:
    """The cases of all kernel modules, or those whose names are the given ones."""
    for name in KERNEL_MODULES:
        module = importlib.import_module(f".{name}", __package__)
        for case in module.offline_cases():
            wanted = ((kernel, case.kernel), (dtype, case.dtype), (config, case.config))
            if all(name in ("", value) for name, value in wanted):
                yield case


def covering(cases: list[OfflineCase]) -> Iterator[tuple[OfflineCase, int]]:
    """(case, integer) so that all cases occur, and all integers with each kernel and dtype."""
    groups: dict[tuple[str, str], list[OfflineCase]] = {}
    for case in cases:
        groups.setdefault((case.kernel, case.dtype), []).append(case)
    for group in groups.values():
        for index in range(max(len(group), len(INTEGER_VALUES))):
            yield group[index % len(group)], INTEGER_VALUES[index % len(INTEGER_VALUES)]


def spread(cases: list[OfflineCase], target: Target) -> list[OfflineCase]:
    """`target`'s share of the cases, so that all occur on one of the CUDA targets.

    The large ones go where there is the least shared memory. Other backends take a ninth of all.
    """
    if target.backend != "cuda":
        return cases[::9]
    every = [other for other in TARGETS.values() if other.backend == "cuda"]
    least = min(other.shared_memory for other in every)
    tight = [other for other in every if other.shared_memory == least]
    share = []
    for sharing, large in ((every, False), (tight, True)):
        if target in sharing:
            among = [case for case in cases if case.large == large]
            share += among[sharing.index(target) :: len(sharing)]
    return share


def compile_case(case: OfflineCase, target: Target, integer: int | None = None) -> list[Report]:
    """Compile what `case` launches for `target`, every integer argument as if it were `integer`."""
    with record_launches(target, integer) as launches:
        case.run()
    return [compile_launch(launch, case, target, integer) for launch in launches]


def specialize(launch: Launch, target: Target) -> tuple[Any, tuple[Any, ...]]:
    """(Triton's backend, per-argument specialisation): two launches compile once if these agree."""
    if is_interpreted(launch.kernel):
        raise RuntimeError("kernels were imported with TRITON_INTERPRET=1: nothing can be compiled")
    backend = make_backend(GPUTarget(target.backend, target.arch, target.warp_size))
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    _, specialization, _ = bind(**launch.args)
    return backend, tuple(map(tuple, specialization))


def compile_key(launch: Launch, target: Target) -> str:
    """Equal for two launches exactly if the second finds the first one's compiled kernel."""
    return f"{specialize(launch, target)[1]} {sorted(launch.options.items())}"


def compile_launch(
    launch: Launch, case: OfflineCase, target: Target, integer: int | None = None
) -> Report:
    """Compile one recorded launch and report on it. Triton's own errors pass through."""
    parameters = {parameter.name: parameter for parameter in launch.kernel.params}
    args = dict(launch.args)
    for name, value in args.items():
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if integer is not None and is_integer and not parameters[name].is_constexpr:
            args[name] = integer
    launch = Launch(launch.kernel, launch.grid, args, launch.options)
    backend, specialization = specialize(launch, target)
    signature = {
        name: entry[0] for name, entry in zip(launch.kernel.arg_names, specialization, strict=True)
    }
    constants, attributes = {}, {}
    for index, (name, entry) in enumerate(zip(signature, specialization, strict=True)):
        if entry[0] == "constexpr":
            constants[(index,)] = args[name]
        elif isinstance(entry[1], str):
            attributes[(index,)] = backend.parse_attr(entry[1])
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options=launch.options,
    )
    name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
    named = {
        "kernel": name,
        "config": case.config,
        "dtype": case.dtype,
        "target": target.name,
        "integers": str(integer) if integer is not None else "as launched",
        "shared_bytes": compiled.metadata.shared,
        "num_warps": compiled.metadata.num_warps,
    }
    if target.backend == "hip":
        return Report(**named, **_read_amdgcn(compiled.asm["amdgcn"]))
    found = _read_cubin(compiled.asm["cubin"])
    tokens = launch.args.get(case.tokens_argument)
    if tokens and found["loop_matrix_instructions"]:
        warp_instructions = found["loop_instructions"] * compiled.metadata.num_warps
        found["instructions_per_token"] = warp_instructions / tokens
    return Report(**named, **found)


_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA(?:\.\w+)*\b.*?0x([0-9a-f]+)")
_MATRIX = re.compile(r"\b[HIDQ]?G?MMA\.|\bUTC\w*MMA")


def disassemble(cubin: bytes) -> list[tuple[int, str]]:
    """(address, instruction) of the one kernel in `cubin`, without the padding at its end."""
    text = _cuobjdump("-sass", cubin)
    found = [(int(address, 16), code) for address, code in _INSTRUCTION.findall(text)]
    return [(address, code) for address, code in found if code != "NOP"]


def main_loop(code: list[tuple[int, str]]) -> list[str]:
    """The instructions of the innermost loop with the most matrix instructions.

    A loop reaches from the target of a backward branch to that branch. Without a matrix instruction
    in any loop this is the longest innermost loop, and without a loop it is empty.
    """
    spans = []
    for address, instruction in code:
        branch = _BRANCH.search(instruction)
        if branch and int(branch[1], 16) < address:
            spans.append((int(branch[1], 16), address))
    innermost = [
        span
        for span in spans
        if not any(o != span and span[0] <= o[0] and o[1] <= span[1] for o in spans)
    ]
    loops = [[text for at, text in code if start <= at <= end] for start, end in innermost]
    return max(loops, key=lambda loop: (_count(_MATRIX, loop), len(loop)), default=[])


def _count(pattern: re.Pattern[str] | str, instructions: list[str]) -> int:
    return sum(bool(re.search(pattern, instruction)) for instruction in instructions)


def _read_cubin(cubin: bytes) -> dict[str, int]:
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", _cuobjdump("-res-usage", cubin)))
    code = disassemble(cubin)
    instructions = [instruction for _, instruction in code]
    loop = main_loop(code)
    spills = _count(r"\b(STL|LDL)\b", instructions)
    return {
        "registers": int(usage["REG"]),
        "spilled_bytes": max(int(usage["STACK"]), 4 * spills),
        "loads_16_bytes": _count(r"\bLDG\.\S*128", instructions),
        "async_16_bytes": _count(r"\bLDGSTS\.\S*128", instructions),
        "matrix_instructions": _count(_MATRIX, instructions),
        "loop_instructions": len(loop),
        "loop_async_16_bytes": _count(r"\bLDGSTS\.\S*128", loop),
        "loop_matrix_instructions": _count(_MATRIX, loop),
    }


def _read_amdgcn(text: str) -> dict[str, int]:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    instructions = text.splitlines()
    return {
        "registers": number("vgpr_count"),
        # A scalar register that spills goes into a lane of a vector register, not to memory.
        "spilled_bytes": max(number("private_segment_fixed_size"), 4 * number("vgpr_spill_count")),
        "loads_16_bytes": _count(r"^\s*(global|buffer)_load_dwordx4\b", instructions),
        "matrix_instructions": _count(r"^\s*v_mfma_", instructions),
    }


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, option, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run_in_subprocess(*arguments: str) -> list[Report]:
    """The reports of `python -m kernels.offline --json ARGUMENTS`, also under the interpreter.

    The interpreter replaces Triton's own device functions when it is imported, so a process with
    TRITON_INTERPRET=1 cannot compile.
    """
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "kernels.offline", "--json", *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return [Report(**row) for row in json.loads(done.stdout)]


def format_table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, numbers aligned to the right."""
    columns = list(rows[0])
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [
        "  ".join(
            value.rjust(width) if value[:1].isdigit() else value.ljust(width)
            for value, width in zip(line, widths, strict=True)
        )
        for line in (columns, *cells)
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Print the resource table, or JSON rows for tests."""
    parser = argparse.ArgumentParser(prog="python -m kernels.offline", description=__doc__)
    parser.add_argument("--target", default="", choices=["", *TARGETS])
    parser.add_argument("--kernel", default="")
    parser.add_argument("--dtype", default="", choices=["", *CASE_DTYPES])
    parser.add_argument("--config", default="")
    parser.add_argument(
        "--integers",
        default="",
        help="compile as if all integers were 1, 16 or 17 (comma-separated), or `covering`: each "
        "case with one of them, each kernel and dtype with all; without it, as launched",
    )
    parser.add_argument("--extra", action="store_true", help="the further sizes and options")
    parser.add_argument(
        "--spread", action="store_true", help="each case on one CUDA target, not on all"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for target in TARGETS.values():
        if options.target not in ("", target.name):
            continue
        cases = [
            case
            for case in offline_cases(options.kernel, options.dtype, options.config)
            if target.supports(CASE_DTYPES[case.dtype])
        ]
        cases = [case for case in cases if case.extra == options.extra]
        cases = spread(cases, target) if options.spread else cases
        if options.integers == "covering":
            chosen = list(covering(cases))
        else:
            integers = [int(value) for value in options.integers.split(",") if value] or [None]
            chosen = list(itertools.product(cases, integers))
        for case, integer in chosen:
            rows += [asdict(report) for report in compile_case(case, target, integer)]
    if options.json:
        print(json.dumps(rows))
    elif rows:
        print(format_table(rows))


if __name__ == "__main__":
    main()
