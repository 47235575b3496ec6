"""The block manager's own look-up, on the CPU and prompt by prompt: numpy, one thread."""

from ..operations.prefix_hash import HashBlocks, MatchPrefix
from .implementation import Call, Implementation


def hashes(op: HashBlocks) -> Call:
    """As many hash chains as prompts."""
    import numpy as np

    width = op.config.prompt_len // op.config.block_size
    blocks = op.prompts[:, : width * op.config.block_size]
    blocks = blocks.reshape(len(op.prompts), width, op.config.block_size)
    root = op.hasher.root()
    return lambda: np.stack([op.hasher.hash_chain(prompt, root) for prompt in blocks])


def match(op: MatchPrefix) -> Call:
    """Hashing, probing, comparing and cutting, as for each request that arrives."""
    return lambda: [op.allocator.find_cached_prefix(prompt) for prompt in op.prompts]


IMPLEMENTATION = Implementation(
    "host", {"hash_blocks": hashes, "match_prefix": match}, on_host=True
)
