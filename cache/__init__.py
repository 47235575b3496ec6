"""Block management for a paged KV cache: decides, in integers, which blocks a sequence owns."""
