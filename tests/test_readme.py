"""What the README shows must run: its commands, made small, and its Python."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.split("  #")[0].strip()
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
    if line.strip()
]
SMALLER = {
    "experiments.serve": ["workload.num_requests=8"],
    "experiments.replay": ["workload.num_requests=50"],
    "capacity_curve": ["evictor=lru,arc", "cache.num_gpu_blocks=500,1000"],
    "policy_table": ["evictor=lru,sieve"],
    "block_size_hit_rate": ["cache.block_size=512,1024"],
    "generate_shared_document": ["prompts.document_tokens=100", "prompts.tokens_between=40"],
    "prompts=random": ["prompts.num_requests=2"],
    "decode_block_size": ["operation.block_size=8,128", "implementation=prefixlab,vllm"],
    "experiments.generate": ["model.name=tiny_llama", "sampling.max_tokens=2"],
}


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_target_exists(command: str) -> None:
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python")])
def test_command_runs(command: str, tmp_path: Path) -> None:
    arguments = shlex.split(command)[1:]
    for argument in arguments:
        key, _, path = argument.partition("=")
        if key == "workload.path" and not (ROOT / path).exists():
            pytest.skip(f"needs {path}")
    app = arguments[arguments.index("-m") + 1]
    is_hydra = app.startswith("experiments.")
    if is_hydra:
        smaller = [a for name, more in SMALLER.items() if name in command for a in more]
        arguments += [a for a in smaller if a.split("=")[0] + "=" not in command]
        arguments += [f"hydra.sweep.dir={tmp_path}/out", f"hydra.run.dir={tmp_path}/out"]
    # Whoever types these has not chosen the interpreter for all that Triton compiles.
    clean = {key: value for key, value in environment().items() if key != "TRITON_INTERPRET"}
    out = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, env=clean
    )
    if is_hydra:
        assert (tmp_path / "out" / "report.html").stat().st_size > 1000
    else:
        assert b"registers" in out.stdout


def test_every_command_is_covered() -> None:
    assert COMMANDS
    for command in COMMANDS:
        assert command.startswith(("make ", "python -m ")), command


@pytest.mark.parametrize("code", [text for language, text in BLOCKS if language == "python"])
def test_python_prints_what_its_comments_say(code: str) -> None:
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment()
    )
    expected = re.findall(r"^print\(.*?\)\s*# (.*)$", code, re.MULTILINE)
    assert out.stdout.splitlines() == expected
    assert expected
