"""What operations are measured with: one file an implementation, found by its IMPLEMENTATION."""

import importlib
import pkgutil

from ...ranges import ConfigError
from .implementation import Implementation

NAMES = sorted(
    module.name for module in pkgutil.iter_modules(__path__) if module.name != "implementation"
)


def find_implementation(name: str) -> Implementation:
    """The implementation in the file of that name. Raises ConfigError for an unknown one."""
    if name not in NAMES:
        raise ConfigError(f"implementation={name}: expected one of {', '.join(NAMES)}")
    implementation = importlib.import_module(f".{name}", __name__).IMPLEMENTATION
    assert implementation.name == name, f"{name}.py names itself {implementation.name}"
    return implementation
