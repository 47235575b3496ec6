"""Which requests arrive when: the workload that a configuration describes."""

from .config import (
    AzureConfig,
    ChatConfig,
    FewShotConfig,
    IndependentConfig,
    MooncakeConfig,
    WorkloadConfig,
)
from .generators import Chat, FewShot, Independent
from .requests import Request, Workload
from .traces import AzureTrace, MooncakeTrace

__all__ = ["Request", "Workload", "make_workload"]


def make_workload(config: WorkloadConfig, seed: int = 0) -> Workload:
    """The workload that `config` describes; equal seeds give equal requests.

    A trace is read through once, so that a malformed line ends the run before it starts.
    Raises InputError, a ValueError, naming file and line for such a line, or the missing file.
    """
    match config:
        case MooncakeConfig():
            return MooncakeTrace(config, seed)
        case AzureConfig():
            return AzureTrace(config, seed)
        case ChatConfig():
            return Chat(config, seed)
        case FewShotConfig():
            return FewShot(config, seed)
        case IndependentConfig():
            return Independent(config, seed)
    raise ValueError(f"no workload is made from {type(config).__name__}")
