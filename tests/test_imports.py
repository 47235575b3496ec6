"""Imports follow the arrows: experiments -> cache, kernels; neither of these imports another."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    "cache": {"kernels", "experiments", "tests", "torch", "triton", "hydra", "pandas"},
    "kernels": {"cache", "experiments", "tests", "hydra", "pandas"},
    "experiments": {"tests"},
}


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """The top-level name and the level of every import in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], 0
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0], node.level


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_follow_the_arrows(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        depth = len(path.relative_to(ROOT / package).parts)
        for name, level in imported_names(path):
            where = f"{path.relative_to(ROOT)} imports {name}"
            assert level <= depth, f"{where} from above its package"
            if level == 0:
                assert name not in FORBIDDEN[package], where
                assert name != package, f"{where}: relative imports inside a package"


def test_the_cache_is_numpy_and_the_standard_library() -> None:
    allowed = {"numpy"} | set(sys.stdlib_module_names)
    for path in sorted((ROOT / "cache").rglob("*.py")):
        for name, level in imported_names(path):
            assert level or name in allowed, f"{path.relative_to(ROOT)} imports {name}"


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return result.stdout


def test_importing_the_cache_loads_no_torch() -> None:
    """At run time, too: also what numpy or a plugin might pull in."""
    code = (
        "import pkgutil, importlib, sys, cache\n"
        "for module in pkgutil.iter_modules(cache.__path__):\n"
        "    importlib.import_module('cache.' + module.name)\n"
        "print('cache.block_manager' in sys.modules)\n"
        "print(sorted({'torch', 'triton', 'kernels', 'experiments', 'hydra'} & {*sys.modules}))"
    )
    assert run_python(code).split("\n")[:2] == ["True", "[]"]


def test_importing_the_cache_is_quick() -> None:
    """Best of three, and beside numpy: that is a third of a second by itself on a busy machine."""
    code = (
        "import time, numpy; start = time.perf_counter()\n"
        "import cache, cache.block_manager; print(time.perf_counter() - start)"
    )
    assert min(float(run_python(code)) for _ in range(3)) < 0.3


def test_packages_set_no_version() -> None:
    """They are run from the checkout and never installed."""
    for package in ("cache", "kernels"):
        assert "__version__" not in (ROOT / package / "__init__.py").read_text(encoding="utf-8")


def test_tests_are_no_package() -> None:
    assert not (ROOT / "tests" / "__init__.py").exists()
