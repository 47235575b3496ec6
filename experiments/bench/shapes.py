"""The named shapes: what `operation=` may be, and what a new GPU is measured with.

They stand here and not in YAML because that measurement has to run where Hydra is not installed. A
shape of your own is a file in `configs/operation/`, such as mine.yaml:

    defaults: [decode, _self_]
    name: mine
    batch_size: 7
"""

from .config import (
    CacheDtype,
    CopyConfig,
    DecodeConfig,
    Direction,
    GatherConfig,
    HashConfig,
    MatchConfig,
    MatchGatherConfig,
    MergeConfig,
    OperationConfig,
    PrefillConfig,
    SwapConfig,
    WriteConfig,
)

SHAPES: dict[str, OperationConfig] = {
    shape.name: shape
    for shape in (
        DecodeConfig("decode"),
        # The keys of one long sequence are split over the device.
        DecodeConfig("decode_single", batch_size=1, context_len=32768),
        DecodeConfig("decode_fp8", cache_dtype=CacheDtype.fp8e5m2),
        PrefillConfig("prefill"),
        # The last 512 tokens of each prompt; the rest is cached.
        PrefillConfig("prefill_cached", batch_size=8, cached_len=7680),
        MergeConfig("merge_states"),
        WriteConfig("write_kv"),
        CopyConfig("copy_blocks"),
        GatherConfig("gather_blocks"),
        SwapConfig("swap_out", direction=Direction.to_host),
        SwapConfig("swap_in", direction=Direction.from_host),
        HashConfig("hash_blocks"),
        MatchConfig("match_prefix"),
        MatchGatherConfig("prefix_hash_gather"),
    )
}
