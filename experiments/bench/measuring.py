"""One point: check an implementation's answer, then time it, and hold it against the device."""

import logging
import os
import sys
from typing import TYPE_CHECKING

from ..ranges import InputError
from ..results import AbsentError, Measurement
from .config import DeviceName, OperationConfig, PointConfig, TimingConfig, check, describe

# What imports Triton is imported once it is known whether kernels are interpreted.
if TYPE_CHECKING:
    from .ceilings import Ceilings
    from .implementations.implementation import Implementation
    from .operations import Operation
    from .timing import Call, Clock

log = logging.getLogger(__name__)

REHEARSED = TimingConfig(warmup_s=0.0, budget_s=1e-3, min_samples=3, max_samples=3)


def choose_device(wanted: DeviceName) -> DeviceName:
    """Where points are measured, `auto` resolved; without a GPU Triton is set up to interpret.

    Must come before the first import of Triton, which reads that setting then. Raises InputError
    where a GPU is asked for and there is none, or where this process interprets.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    if wanted is DeviceName.auto:
        wanted = DeviceName.cuda if has_gpu else DeviceName.offline
    if wanted is DeviceName.cuda:
        if not has_gpu:
            raise InputError("device=cuda: there is no GPU here")
        if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
            raise InputError("device=cuda: TRITON_INTERPRET is set, so no kernel would be compiled")
        return wanted
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError(f"device={wanted}: Triton was imported to compile; use another process")
    os.environ["TRITON_INTERPRET"] = "1"
    return wanted


def device_name(wanted: DeviceName) -> str:
    """What stands in the rows: the GPU's name, or what takes its place."""
    import torch

    if wanted in (DeviceName.auto, DeviceName.cuda) and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "Triton's interpreter" if wanted is DeviceName.rehearsal else "none"


class Bench:
    """Measures points one after another; what they share is made once.

    Points of one operation that come one after another share its inputs, all of one dtype the
    device's ceilings.
    """

    def __init__(self, chosen: DeviceName) -> None:
        import torch

        self.chosen = chosen
        self.device = torch.device("cuda" if chosen is DeviceName.cuda else "cpu")
        self._operation: tuple[str, Operation] | None = None
        self._ceilings: dict[torch.dtype, Ceilings] = {}
        self._clock: Clock | None = None

    def measure(self, config: PointConfig) -> Measurement:
        """One point.

        Raises ConfigError for what can't be configured, AbsentError for what can't be measured
        here, WrongAnswerError where the answer is not the operation's.
        """
        import torch
        from triton.runtime.errors import OutOfResources

        from .implementations import find_implementation
        from .operations import operation_of

        check(config)
        implementation = find_implementation(config.implementation)
        implementation.demand(operation_of(config.operation).kind)
        if self.chosen is DeviceName.offline and not implementation.on_host:
            from .offline import report

            return report(config)
        try:
            return self._measure(config, implementation)
        except OutOfResources as error:
            raise AbsentError(f"does not fit: {error}") from None
        except torch.OutOfMemoryError as error:
            self._operation = None
            torch.cuda.empty_cache()
            raise AbsentError(f"out of memory: {str(error).split('. ')[0]}") from None

    def is_lost(self) -> bool:
        """Whether the device has ceased to answer this process, as after an illegal access."""
        import torch

        if self.device.type == "cpu":
            return False
        try:
            torch.cuda.synchronize()
            torch.ones(1, device=self.device).item()
        except RuntimeError:
            return True
        return False

    def _measure(self, config: PointConfig, implementation: "Implementation") -> Measurement:
        import torch

        from kernels.launch import target_of

        from .figures import figures, host_figures
        from .operations import operation_of
        from .timing import HostClock, time_call

        shape, timing = config.operation, config.timing
        if self.chosen is DeviceName.rehearsal:
            shape, timing = operation_of(shape).reduced(shape), REHEARSED
        # Before the inputs: both take memory.
        ceilings = None if implementation.on_host else self._measure_ceilings(shape, timing)
        operation = self._inputs(shape, config.seed)
        call = implementation.prepare(operation)

        def check_answer(run: "Call") -> None:
            operation.poison()
            operation.check(run())

        check_answer(call)
        cost = type(operation).cost(shape)
        notes = {
            "kind": self._kind(implementation.on_host),
            "shape": describe(config.operation),
            "version": implementation.version(),
        }
        if self.chosen is DeviceName.rehearsal:
            notes["rehearsed_shape"] = describe(shape)
        if ceilings is None:
            timed = time_call(call, HostClock(), timing, check_answer)
            return Measurement(host_figures(cost, timed), notes=notes | {"clock": timed.method})
        timed = time_call(call, self._device_clock(), timing, check_answer)
        target = target_of(self.device)
        notes |= {"clock": timed.method, "target": target.name, "backend": target.backend}
        notes["runtime"] = torch.version.cuda or torch.version.hip or "none"
        metrics, suspect = figures(cost, timed, ceilings, self._l2_bytes())
        if self.chosen is DeviceName.rehearsal:
            suspect = ""
        if suspect:
            log.error(suspect)
        return Measurement(metrics, suspect=suspect, notes=notes)

    def _kind(self, on_host: bool) -> str:
        """What a row's figures are."""
        if self.chosen is DeviceName.rehearsal:
            return "rehearsal: its times mean nothing"
        return "measured on the CPU" if on_host else "measured"

    def _inputs(self, shape: OperationConfig, seed: int) -> "Operation":
        """The operation's inputs: those of the last point, if that was of the same shape."""
        from .operations import make_operation

        key = repr((shape, seed))
        if self._operation is None or self._operation[0] != key:
            # Only then the memory of the old ones can hold the new ones.
            self._operation = None
            self._operation = (key, make_operation(shape, self.device, seed))
        return self._operation[1]

    def _measure_ceilings(self, shape: OperationConfig, timing: TimingConfig) -> "Ceilings":
        """Of the operation's dtype; the dtype doesn't matter where there are no matrices."""
        from .ceilings import measure_ceilings
        from .config import Dtype
        from .operations.operation import torch_dtype

        dtype = torch_dtype(getattr(shape, "dtype", Dtype.bf16))
        if dtype not in self._ceilings:
            clock = self._device_clock()
            self._ceilings[dtype] = measure_ceilings(self.device, dtype, clock, timing)
        return self._ceilings[dtype]

    def _device_clock(self) -> "Clock":
        from .timing import clock_for

        if self._clock is None:
            self._clock = clock_for(self.device)
        return self._clock

    def _l2_bytes(self) -> int:
        import torch

        if self.device.type == "cpu":
            return 0
        return torch.cuda.get_device_properties(self.device).L2_cache_size
