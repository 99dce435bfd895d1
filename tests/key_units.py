"""Whether every number of a JSON object says its unit in its key."""

from collections.abc import Iterator, Mapping

#: A key that ends in one of these says its unit, or is one of them without the underscore.
UNITS = (
    "_bytes",
    "_bytes_per_s",
    "_per_s",
    "_s",
    "_ns",
    "_loss",
    "_ratio",
    "_count",
    "_percent",
    "_per_gb_s",
    "_per_parameter",
    "_nats_per_byte",
    "_crc32c",
    "_version",
    "_threads",
)
#: Counts and pure numbers, which have no unit to say.
COUNTS = frozenset(
    {
        *("active_records", "bytes_per_parameter", "capacity_frames", "collectives", "commits", "cores"),
        *("carried_tensors", "expert_parameters", "files", "skipped_records", "tensors", "total_parameters"),
        *("data_ranks", "node_ranks", "pipeline_degree", "stages", "stages_before"),
        *("tensor_ranks", "tensor_ranks_before"),
        *("creates", "depth", "disk_transfers", "drive_life_years", "drive_writes_per_day", "events"),
        *("evictions", "expert_ranks", "expert_ranks_before", "experts", "frames", "generation"),
        *("half_life_steps", "hits", "intervals", "keys", "layer", "layer_quotas", "layer_records"),
        *("layers", "left_out", "lookahead_frames", "loss", "misses", "not_admitted", "parameters", "points"),
        *("policy_options", "rank", "ranks", "ranks_before", "record_parameters", "records", "repeats"),
        *("replayed", "replayed_steps", "requests", "resized", "rounds", "s_per_parameter", "sections"),
        *("seed", "snapshots", "stalled_rank", "starved", "step", "steps", "threads", "tokens"),
        *("total_frames", "tuned_steps", "warmup_steps", "write_backs"),
    }
)


def violations(value: object, *, key: str = "", path: str = "") -> Iterator[str]:
    """The dotted keys in ``value`` that hold numbers and say no unit. A list's numbers go by its key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from violations(inner, key=str(name), path=f"{path}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            if (found := next(violations(inner, key=key, path=path), None)) is not None:
                yield found
                break
    elif isinstance(value, int | float) and not isinstance(value, bool):
        named = any(key.endswith(unit) or key == unit[1:] for unit in UNITS)
        if not named and key not in COUNTS:
            yield path
