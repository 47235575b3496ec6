"""What is known of a GPU from its data sheet."""

from dataclasses import dataclass

from .ranges import AUTO, EFFICIENCY, MISSING, POSITIVE, Range, ranged


@dataclass
class GpuConfig:
    """One GPU's datasheet figures, and the modelling assumptions of the roofline clock."""

    name: str = MISSING
    target: str = MISSING  # code that it runs: a name in kernels.launch.TARGETS
    flops_per_s: float = ranged(POSITIVE)  # dense bf16
    fp32_flops_per_s: float = ranged(POSITIVE)  # without tensor or matrix cores
    memory_bytes: float = ranged(POSITIVE)
    memory_bytes_per_s: float = ranged(POSITIVE)
    pcie_bytes_per_s: float = ranged(POSITIVE)  # one direction
    link_bytes_per_s: float = ranged(POSITIVE)  # GPU to GPU, one direction
    tensor_parallel: int | str = ranged(Range(1, words=(AUTO,)), AUTO)
    compute_efficiency: float = ranged(EFFICIENCY, 0.6)
    memory_efficiency: float = ranged(EFFICIENCY, 0.8)
    transfer_efficiency: float = ranged(EFFICIENCY, 0.8)
    step_overhead_s: float = ranged(Range(0), 0.002)
    memory_utilization: float = ranged(EFFICIENCY, 0.9)
    reserved_bytes: float = ranged(Range(0), 1.5e9)  # activations and graphs, each GPU
    host_swap_bytes: float = ranged(Range(0), 4e9)  # host memory for swapped KV, each GPU
