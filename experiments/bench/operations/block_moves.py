"""Moving whole blocks of all layers: copy-on-write, gather, and swap to and from the host."""

from typing import Any

import torch

from kernels.testing import poison_

from ..config import CopyConfig, Direction, GatherConfig, HeadsConfig, SwapConfig
from .operation import Cost, Operation, as_bits, block_bytes, limited, require, torch_dtype

SPARE = 2
"""A pool has so many times the blocks that are moved, so that these lie scattered."""


class BlockMove(Operation):
    """Blocks that go from `sources` to `destinations`, the same ones in each pair of tensors.

    Attributes:
        sources, destinations: tensors [num_blocks, block_size, num_kv_heads, head_size], keys and
            values of all layers.
        pairs: int64 [num_pairs, 2] of (source, destination) block, on `device`.
    """

    sources: list[torch.Tensor]
    destinations: list[torch.Tensor]
    pairs: torch.Tensor

    def poison(self) -> None:
        for tensor in self.destinations:
            rows = self.pairs[:, 1].to(tensor.device)
            blank = poison_(torch.empty_like(tensor[:1]))
            tensor[rows] = blank.expand(len(rows), *blank.shape[1:])

    def check(self, answer: Any) -> None:
        """Every moved block of every tensor, bit for bit, and that no other one was changed."""
        del answer
        if self.device.type == "cuda":
            # Pinned host memory may be read before the device has written it.
            torch.cuda.synchronize()
        for now, before in zip(self._other_sums(), self._drawn_sums, strict=True):
            require(torch.equal(now, before), "a block changed that nothing was to be moved to")
        for index, (source, destination) in enumerate(
            zip(self.sources, self.destinations, strict=True)
        ):
            wanted = source[self.pairs[:, 0].to(source.device)]
            found = destination[self.pairs[:, 1].to(destination.device)].to(wanted.device)
            require(
                torch.equal(as_bits(wanted), as_bits(found)), f"a block of tensor {index} differs"
            )

    def _other_sums(self) -> list[torch.Tensor]:
        """The sum of the bytes of each block, 0 for those that something is moved to."""
        sums = []
        if self.sources is not self.destinations:
            sums = [_byte_sums(tensor) for tensor in self.sources]
        for tensor in self.destinations:
            moved = self.pairs[:, 1].to(tensor.device)
            sums.append(_byte_sums(tensor).index_fill_(0, moved, 0))
        return sums

    def _pool(self, config: HeadsConfig, num_layers: int, num_blocks: int) -> list[torch.Tensor]:
        shape = (num_blocks, config.block_size, config.num_kv_heads, config.head_size)
        dtype = torch_dtype(config.dtype)
        return [self.randn(*shape, dtype=dtype) for _ in range(2 * num_layers)]


def _byte_sums(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [num_blocks]."""
    return as_bits(tensor).flatten(1).sum(1, dtype=torch.int64)


class CopyBlocks(BlockMove):
    """Copy-on-write within a cache; `sources` and `destinations` are the same tensors."""

    kind = "copy_blocks"

    def __init__(self, config: CopyConfig, device: torch.device, seed: int) -> None:
        super().__init__(config, device, seed)
        used = config.num_sources * (1 + config.fanout)
        self.sources = self.destinations = self._pool(config, config.num_layers, SPARE * used)
        blocks = self.shuffled(SPARE * used)[:used]
        sources = blocks[: config.num_sources].repeat_interleave(config.fanout)
        self.pairs = torch.stack([sources, blocks[config.num_sources :]], dim=1)
        self._drawn_sums = self._other_sums()

    @classmethod
    def cost(cls, config: CopyConfig) -> Cost:
        """Each source is read once, however many copies are made of it."""
        per_source = 2 * config.num_layers * config.num_sources * block_bytes(config)
        num_copies = config.num_sources * config.fanout
        written = config.fanout * per_source
        return Cost(per_source, written, unit="blocks", num_units=num_copies)

    @classmethod
    def reduced(cls, config: CopyConfig, *, to_compile: bool = False) -> CopyConfig:
        return limited(config, num_layers=1, num_sources=2)


class GatherBlocks(BlockMove):
    """Gathering scattered blocks into contiguous memory; `destinations` hold nothing else."""

    kind = "gather_blocks"

    def __init__(self, config: GatherConfig, device: torch.device, seed: int) -> None:
        super().__init__(config, device, seed)
        self.sources = self._pool(config, config.num_layers, SPARE * config.num_blocks)
        self.destinations = [torch.empty_like(s[: config.num_blocks]) for s in self.sources]
        scattered = self.shuffled(SPARE * config.num_blocks)[: config.num_blocks]
        self.pairs = torch.stack([scattered, torch.arange(len(scattered), device=device)], dim=1)
        self._drawn_sums = self._other_sums()

    @classmethod
    def cost(cls, config: GatherConfig) -> Cost:
        moved = 2 * config.num_layers * config.num_blocks * block_bytes(config)
        return Cost(moved, moved, unit="blocks", num_units=config.num_blocks)

    @classmethod
    def reduced(cls, config: GatherConfig, *, to_compile: bool = False) -> GatherConfig:
        return limited(config, num_layers=1, num_blocks=4)


class SwapBlocks(BlockMove):
    """Swapping blocks between the device's cache and one in host memory, pinned beside a GPU."""

    kind = "swap_blocks"

    def __init__(self, config: SwapConfig, device: torch.device, seed: int) -> None:
        super().__init__(config, device, seed)
        on_device = self._pool(config, config.num_layers, SPARE * config.num_blocks)
        on_host = [
            torch.empty(
                s[: config.num_blocks].shape, dtype=s.dtype, pin_memory=device.type != "cpu"
            )
            for s in on_device
        ]
        scattered = self.shuffled(SPARE * config.num_blocks)[: config.num_blocks]
        pairs = torch.stack([scattered, self.shuffled(config.num_blocks)], dim=1)
        if config.direction is Direction.to_host:
            self.sources, self.destinations, self.pairs = on_device, on_host, pairs
        else:
            for host, cache in zip(on_host, on_device, strict=True):
                host.copy_(cache[: config.num_blocks])
            self.sources, self.destinations = on_host, on_device
            self.pairs = pairs.flip(1).contiguous()
        self._drawn_sums = self._other_sums()

    @classmethod
    def cost(cls, config: SwapConfig) -> Cost:
        moved = 2 * config.num_layers * config.num_blocks * block_bytes(config)
        return Cost(
            moved, moved, link=config.direction.value, unit="blocks", num_units=config.num_blocks
        )

    @classmethod
    def reduced(cls, config: SwapConfig, *, to_compile: bool = False) -> SwapConfig:
        return limited(config, num_layers=1, num_blocks=4)
