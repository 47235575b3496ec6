"""What operations are measured with: one file an implementation, found by its IMPLEMENTATION."""

import importlib
import pkgutil

from ...ranges import ConfigError
from .implementation import Implementation

NAMES = sorted(
    module.name for module in pkgutil.iter_modules(__path__) if module.name != "implementation"
)


def find_implementation(name: str) -> Implementation:
    """The implementation in the file of that name.

    Raises ConfigError for an unknown one, or a file without IMPLEMENTATION, and what importing the
    file raises.
    """
    if name not in NAMES:
        raise ConfigError(f"implementation={name}: expected one of {', '.join(NAMES)}")
    module = importlib.import_module(f".{name}", __name__)
    implementation = getattr(module, "IMPLEMENTATION", None)
    if implementation is None or implementation.name != name:
        raise ConfigError(f"{name}.py: expected IMPLEMENTATION = Implementation({name!r}, ...)")
    return implementation
