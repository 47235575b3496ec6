"""The eviction policies, one file each. `cache.evictor` finds every `Policy` in this folder."""
