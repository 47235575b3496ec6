"""How long a step takes: the larger of its arithmetic and its memory traffic, plus fixed costs.

Assumptions, all of them configured in `gpu`: the share of peak FLOPs and of peak bandwidth that
kernels reach, a fixed overhead a step (scheduling, launches, sampling), ring all-reduces that
don't overlap with arithmetic, and weights and KV cache split evenly over `tensor_parallel` GPUs.
"""

from typing import NamedTuple

import numpy as np

from .config import AUTO, GpuConfig, ModelConfig, ServeConfig
from .ranges import ConfigError
from .visible import visible_pairs

MIN_KV_SHARE = 0.1
"""With tensor_parallel=auto, the least share of usable memory that weights must leave for KV."""


class PoolSize(NamedTuple):
    """Blocks in each pool, over all GPUs of one replica."""

    num_gpu_blocks: int
    num_cpu_blocks: int


def num_body_parameters(model: ModelConfig) -> int:
    """Parameters of all layers and the final norm, without the two embedding tables."""
    attention = model.hidden_size * model.head_size * 2 * (model.num_heads + model.num_kv_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    norms = 2 * model.hidden_size + (2 * model.head_size if model.qk_norm else 0)
    return model.num_layers * (attention + mlp + norms) + model.hidden_size


def num_parameters(model: ModelConfig) -> int:
    """All parameters: the layers, the input embedding and the untied output projection."""
    return num_body_parameters(model) + 2 * model.vocab_size * model.hidden_size


def weight_bytes(model: ModelConfig) -> float:
    """Memory that the weights take, over all GPUs."""
    return num_parameters(model) * model.bytes_per_weight


def kv_bytes_per_token(model: ModelConfig) -> float:
    """Key and value bytes that one token adds in all layers, over all GPUs."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * model.bytes_per_kv_element


def tensor_parallel(model: ModelConfig, gpu: GpuConfig) -> int:
    """GPUs that hold one replica: as configured, or the least power of two that is enough.

    Enough leaves MIN_KV_SHARE of the usable memory to KV. Raises ConfigError where KV heads don't
    divide evenly or where no degree is enough.
    """
    if gpu.tensor_parallel != AUTO:
        if model.num_kv_heads % gpu.tensor_parallel:
            raise ConfigError(
                f"gpu.tensor_parallel={gpu.tensor_parallel}: expected a divisor of "
                f"model.num_kv_heads={model.num_kv_heads}"
            )
        return gpu.tensor_parallel
    degree = 1
    while model.num_kv_heads % degree == 0:
        if weight_bytes(model) <= (1 - MIN_KV_SHARE) * degree * _usable_bytes(gpu):
            return degree
        degree *= 2
    raise ConfigError(
        f"gpu.name={gpu.name}: {degree // 2} of them can't hold the "
        f"{weight_bytes(model) / 1e9:.1f} GB of weights of model.name={model.name}"
    )


def pool_size(config: ServeConfig) -> PoolSize:
    """Blocks of the GPU and CPU pools: as configured, or for "auto", what the memory holds.

    GPU: usable memory less weights; CPU: `gpu.host_swap_bytes`. Raises ConfigError where not even
    one block fits on the GPUs.
    """
    degree = tensor_parallel(config.model, config.gpu)
    block_bytes = config.cache.block_size * kv_bytes_per_token(config.model)
    num_gpu_blocks = config.cache.num_gpu_blocks
    if num_gpu_blocks == AUTO:
        kv_bytes = degree * _usable_bytes(config.gpu) - weight_bytes(config.model)
        num_gpu_blocks = int(kv_bytes // block_bytes)
        if num_gpu_blocks < 1:
            raise ConfigError(
                f"cache.num_gpu_blocks=auto: {degree} x {config.gpu.name} leave "
                f"{kv_bytes / 1e9:.2f} GB beside the weights of {config.model.name}, less than "
                f"one block of {config.cache.block_size} tokens"
            )
    num_cpu_blocks = config.cache.num_cpu_blocks
    if num_cpu_blocks == AUTO:
        num_cpu_blocks = int(degree * config.gpu.host_swap_bytes // block_bytes)
    return PoolSize(num_gpu_blocks, num_cpu_blocks)


def _usable_bytes(gpu: GpuConfig) -> float:
    """Memory of one GPU that weights and KV may fill."""
    return gpu.memory_bytes * gpu.memory_utilization - gpu.reserved_bytes


class Roofline:
    """The clock of the simulation: seconds of a step, and of moving blocks over PCIe."""

    def __init__(self, config: ServeConfig) -> None:
        model, gpu = config.model, config.gpu
        degree = tensor_parallel(model, gpu)
        output_weights = model.vocab_size * model.hidden_size
        self._flops_per_token = 2 * num_body_parameters(model)
        self._flops_per_sequence = 2 * output_weights
        # Queries times keys and scores times values, for each query token and key it attends.
        self._flops_per_pair = 4 * model.num_layers * model.num_heads * model.head_size
        self._weight_bytes = (num_body_parameters(model) + output_weights) * model.bytes_per_weight
        self._kv_bytes_per_token = kv_bytes_per_token(model)
        self._block_bytes = config.cache.block_size * self._kv_bytes_per_token
        self._window = config.cache.sliding_window
        self._flops_per_s = degree * gpu.flops_per_s * gpu.compute_efficiency
        self._bytes_per_s = degree * gpu.memory_bytes_per_s * gpu.memory_efficiency
        self._pcie_bytes_per_s = degree * gpu.pcie_bytes_per_s * gpu.transfer_efficiency
        self._overhead_s = gpu.step_overhead_s
        # A ring all-reduce sends 2 (n - 1) / n of the activations; two of them a layer.
        reduced_bytes = 2 * model.num_layers * model.hidden_size * model.bytes_per_weight
        self._reduce_s_per_token = (
            2 * (degree - 1) / degree * reduced_bytes / gpu.link_bytes_per_s
        ) / gpu.transfer_efficiency

    def step_seconds(self, query_lens: np.ndarray, context_lens: np.ndarray) -> float:
        """Seconds that one step takes.

        Both are int64 [num_seqs], one entry a scheduled sequence: tokens computed in this step,
        and tokens whose KV is attended, these included (so query_lens <= context_lens).

        FLOPs: 2 a layer parameter and token; 2 an output-projection weight and sequence, as only
        its last token is sampled from; 4 a head dimension, layer and (query, key) pair that
        causality and the window allow. Bytes: weights read once, each sequence's KV read once,
        new KV written. An empty step costs the overhead.
        """
        num_tokens = int(query_lens.sum())
        if self._window is None:
            # The last query token attends the whole context, each one before it one key less.
            pairs = int(query_lens @ context_lens) - (int(query_lens @ query_lens) - num_tokens) / 2
            num_read = int(context_lens.sum())
        else:
            window = self._window
            first = context_lens - query_lens
            pairs = int((visible_pairs(context_lens, window) - visible_pairs(first, window)).sum())
            num_read = int(np.minimum(context_lens, query_lens + (window - 1)).sum())
        flops = (
            self._flops_per_token * num_tokens
            + self._flops_per_sequence * len(query_lens)
            + self._flops_per_pair * pairs
        )
        moved = self._kv_bytes_per_token * (num_read + num_tokens)
        if num_tokens:
            moved += self._weight_bytes
        return (
            max(flops / self._flops_per_s, moved / self._bytes_per_s)
            + self._reduce_s_per_token * num_tokens
            + self._overhead_s
        )

    def prefill_seconds(self, query_lens: np.ndarray, context_lens: np.ndarray) -> np.ndarray:
        """What `step_seconds` says of each sequence in a step of its own, float64 [num_seqs].

        Without a sliding window.
        """
        pairs = query_lens * context_lens - query_lens * (query_lens - 1) / 2
        flops = (
            self._flops_per_token * query_lens
            + self._flops_per_sequence
            + self._flops_per_pair * pairs
        )
        moved = self._kv_bytes_per_token * (context_lens + query_lens) + self._weight_bytes
        return (
            np.maximum(flops / self._flops_per_s, moved / self._bytes_per_s)
            + self._reduce_s_per_token * query_lens
            + self._overhead_s
        )

    def copy_seconds(self, num_blocks: int) -> float:
        """Seconds that copying `num_blocks` within GPU memory takes: each is read and written."""
        return 2 * num_blocks * self._block_bytes / self._bytes_per_s

    def swap_seconds(self, num_blocks: int) -> float:
        """Seconds that `num_blocks` take over PCIe in one direction; each GPU moves its share."""
        return num_blocks * self._block_bytes / self._pcie_bytes_per_s
