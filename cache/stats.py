"""Counters of what an allocator did since it was built or its cache was reset."""

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Counts of blocks, each over all allocations and appends of one device."""

    lookups: int = 0
    """Full blocks of prompts that were looked up in the cache on allocation."""
    hits: int = 0
    """Of these, those found: the sequence shares the cached block, computed or not."""
    evictions: int = 0
    """Cached blocks whose content was given up for a new one."""
    copies: int = 0
    """Copy-on-write pairs recorded, also those withdrawn later."""
    promotions: int = 0
    """Mutable blocks that filled with cached content and were exchanged for the cached block."""

    @property
    def hit_rate(self) -> float:
        """hits / lookups; NaN before the first lookup."""
        return self.hits / self.lookups if self.lookups else float("nan")
