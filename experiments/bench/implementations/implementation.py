"""What an implementation offers: for each kind of operation, how to get ready to be timed."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ...results import AbsentError
from ..operations.operation import Operation

Call = Callable[[], Any]


@dataclass(frozen=True)
class Implementation:
    """A library, or a way to write things, that operations can be measured with.

    Attributes:
        name: as given by `implementation=`.
        prepares: for each kind of operation that it offers, a function that takes the operation
            and returns a call without arguments. Only the call is timed: plans and masks that
            users make once belong before it. The call returns what the operation's `check` takes.
        requires: the module without which it is absent; empty where nothing else is needed.
        distribution: of that module, for its version; the module's name if empty.
        on_host: whether it runs on the CPU, so that a GPU's clock has nothing to measure.
    """

    name: str
    prepares: Mapping[str, Callable[[Any], Call]]
    requires: str = ""
    distribution: str = ""
    on_host: bool = field(default=False)

    def demand(self, kind: str) -> None:
        """Raise AbsentError unless it is installed and offers this kind of operation."""
        if kind not in self.prepares:
            raise AbsentError(f"{self.name} has no {kind}")
        if self.requires and not _is_installed(self.requires):
            raise AbsentError(f"{self.name}: {self.requires} is not installed")

    def prepare(self, operation: Operation) -> Call:
        """The call to check and time. Raises AbsentError where there is none for these inputs."""
        self.demand(operation.kind)
        return self.prepares[operation.kind](operation)

    def version(self) -> str:
        """The installed version of what it requires; empty for this project's own code."""
        if not self.requires:
            return ""
        try:
            return version(self.distribution or self.requires)
        except PackageNotFoundError:
            return "unknown"


def _is_installed(module: str) -> bool:
    """A stand-in that another library registered under that name has no spec, and is none."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        return False
