"""``tierstore bench``: how fast this machine runs what tierstore does, in ratios measured in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierstore.cli.bench_io import io
from tierstore.cli.bench_machine import machine
from tierstore.cli.bench_prediction import prediction
from tierstore.cli.options import SIZE, config_overrides, help_config_option, json_option, set_option
from tierstore.cli.output import Output
from tierstore.config import load
from tierstore.units import format_bytes, format_seconds

__all__ = ["bench"]

_COUNTS = frozenset(
    {
        "warmup_steps",
        "rounds",
        "replayed_steps",
        "bytes_per_parameter",
        "s_per_parameter",
        "record_parameters",
        "ranks",
        "layers",
        "collectives",
        "disk_transfers",
    }
)


def _config_class() -> type[object]:
    from tierstore.train.config import TrainConfig

    return TrainConfig


@click.group()
def bench() -> None:
    """Stress tests and benchmarks. Each prints a table; with --json the last line is one object."""


bench.add_command(io)
bench.add_command(machine)
bench.add_command(prediction)


@bench.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--steps", type=int, default=5, show_default=True, help="Steps of one round.")
@click.option("--warmup", type=int, default=5, show_default=True, help="Steps before the first round.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds; the runs take turns.")
@click.option("--host-budget", type=SIZE, help="Memory for experts in the tiered run.")
@click.option("--store", type=click.Path(path_type=Path), help="A directory to make, measure in, and remove.")
@click.option(
    "--baseline",
    type=click.Choice(["in-ram", "none"]),
    default="in-ram",
    show_default=True,
    help="What to compare with; none for models that do not fit in RAM.",
)
@click.option("--cgroup-limit", type=SIZE, default="0", help="Confine the tiered run to a memory cgroup.")
@set_option
@json_option
@help_config_option(_config_class)
def train(
    config: Path | None,
    steps: int,
    warmup: int,
    rounds: int,
    host_budget: int | None,
    store: Path | None,
    baseline: str,
    cgroup_limit: int,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """The same steps with everything in RAM and with experts on disk, in turns.

    The bound of a step is max(the same step in RAM, compulsory bytes / bandwidth), the bandwidth that of the
    same mix of reads and writes.
    """
    from tierstore.bench.training import Baseline, TrainBench, run
    from tierstore.train.config import TrainConfig

    place = store or Path("tierstore-bench")
    overrides = config_overrides(settings, {"host_budget": host_budget, "store": place})
    loaded = load(TrainConfig, config, overrides)
    plan = TrainBench(
        steps=steps, warmup=warmup, rounds=rounds, baseline=Baseline(baseline), cgroup_limit=cgroup_limit
    )
    output = Output.for_option(as_json, counts=_COUNTS)
    result = run(loaded, plan, output.line)
    _show_training(result, output)
    output.emit(result)


def _show_training(result: dict[str, Any], output: Output) -> None:
    runs = [
        (title, result[key]) for title, key in (("in RAM", "in_ram"), ("tiered", "tiered")) if key in result
    ]
    rows: list[tuple[str, ...]] = [
        ("step, median", *(format_seconds(run["step_median_s"]) for _, run in runs)),
        (
            "step, 10% to 90%",
            *(
                f"{format_seconds(run['step_p10_s'])} to {format_seconds(run['step_p90_s'])}"
                for _, run in runs
            ),
        ),
        ("CPU time a step, all threads", *(format_seconds(run["step_cpu_s"]) for _, run in runs)),
        ("read a step", *(format_bytes(run["step_read_bytes"]) for _, run in runs)),
        ("written a step", *(format_bytes(run["step_written_bytes"]) for _, run in runs)),
        ("hits", *(f"{run['hit_ratio']:.1%}" for _, run in runs)),
        ("stalled a step", *(format_seconds(_stalled_s(run)) for _, run in runs)),
        ("peak resident memory", *(format_bytes(run["peak_resident_bytes"]) for _, run in runs)),
    ]
    output.line(
        f"{result['parameters'] / 1e6:.0f} M parameters, {format_bytes(result['record_bytes'])} of expert "
        f"records, host budget {format_bytes(result['host_budget_bytes'])}"
    )
    output.table("", ("", *(title for title, _ in runs)), rows)
    for line in result["effective"]:
        output.line(line)
    speed = result["disk_bytes_per_s"]
    output.line(
        f"{result['tokens_per_s']:.0f} tokens/s; compulsory "
        f"{format_bytes(result['compulsory_read_bytes'])} read "
        f"and {format_bytes(result['compulsory_written_bytes'])} written a step "
        f"({result['compulsory_policy']}; clairvoyant {format_bytes(result['clairvoyant_bytes'])} in all)"
        + (f" at {format_bytes(int(speed))}/s take {format_seconds(result['compulsory_s'])}" if speed else "")
    )
    if result["step_to_in_ram_ratio"] is not None:
        output.line(
            f"step / bound {result['step_to_bound_ratio']:.3f}, bound {format_seconds(result['bound_s'])}; "
            f"step / step in RAM {result['step_to_in_ram_ratio']:.3f}; "
            f"same losses: {'yes' if result['same_losses'] else 'NO'}"
        )
    else:
        output.line(f"step / time of compulsory bytes {result['step_to_bound_ratio']:.3f}")
    if result["page_cache_bytes"] is not None:
        output.line(
            f"in the page cache: {format_bytes(result['page_cache_bytes'])} of "
            f"{format_bytes(result['extent_bytes'])} of extents"
        )
    if "cgroup_limit_bytes" in result:
        output.line(
            f"memory cgroup of {format_bytes(result['cgroup_limit_bytes'])}: peak "
            f"{format_bytes(result['cgroup_peak_bytes'])}, {result['cgroup_kills_count']} kills"
        )


def _stalled_s(run: dict[str, Any]) -> float:
    return float(sum(stall["step_stall_s"] for stall in run["stalls"]))


@bench.command()
@click.option("--parameters", type=int, default=100_000_000, show_default=True, help="fp32 parameters.")
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--repeats", type=int, default=7, show_default=True, help="Rounds.")
@click.option(
    "--store",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("."),
    help="Where to measure the read of a record.",
)
@json_option
def adamw(parameters: int, threads: int, repeats: int, store: Path, as_json: bool) -> None:
    """The native AdamW against torch's fused AdamW, the machine's copy bandwidth, and a read from disk."""
    from tierstore.bench.adamw import render, run

    output = Output.for_option(as_json, counts=_COUNTS)
    result = run(parameters, threads, repeats, directory=store)
    render(result, output)
    output.emit(result)


@bench.command()
@click.option("--records", type=int, default=32, show_default=True)
@click.option("--record-bytes", type=SIZE, default="24MiB", show_default=True)
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--store", type=click.Path(path_type=Path), help="A directory to make, measure in, and remove.")
@json_option
def commit(records: int, record_bytes: int, rounds: int, store: Path | None, as_json: bool) -> None:
    """A commit of a cache full of dirty records against durable writes of the same bytes."""
    from tierstore.bench.commit import run

    output = Output.for_option(as_json, counts=_COUNTS)
    result = run(store or Path("tierstore-bench"), records=records, record_bytes=record_bytes, rounds=rounds)
    output.table(
        f"{records} records, {format_bytes(result['dirty_bytes'])} dirty, {rounds} rounds",
        ("", "median", "least", "greatest"),
        [
            (
                title,
                *(format_seconds(result[f"{key}_{which}_s"]) for which in ("median", "least", "greatest")),
            )
            for title, key in (("commit", "commit"), ("durable write of the same bytes", "write"))
        ],
    )
    output.line(f"commit / write {result['commit_to_write_ratio']:.3f}")
    output.emit(result)


@bench.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option(
    "--stack",
    type=click.Choice(["synthetic", "trainer"]),
    default="synthetic",
    show_default=True,
    help="Layers that only take time, or the trainer as CONFIG and --set say.",
)
@click.option("--steps", type=int, default=5, show_default=True, help="Steps measured of each run.")
@click.option("--warmup", type=int, default=3, show_default=True, help="Steps before them.")
@click.option("--layers", type=int, default=16, show_default=True, help="Of the synthetic stack.")
@click.option(
    "--forward-ms", type=float, default=20.0, show_default=True, help="Computation of a layer's pass."
)
@click.option(
    "--computation",
    type=click.Choice(["matmul", "device"]),
    default="matmul",
    show_default=True,
    help="On the processor, or as a device would: a time in which the processor is free.",
)
@click.option("--store", type=click.Path(path_type=Path), help="A directory to make, measure in, and remove.")
@click.option(
    "--timeline", type=click.Path(path_type=Path), help="Rank 0's Chrome trace of the balanced run."
)
@click.option(
    "--svg", type=click.Path(path_type=Path), help="A picture of one of its steps (needs matplotlib)."
)
@set_option
@json_option
@help_config_option(_config_class)
def overlap(
    config: Path | None,
    stack: str,
    steps: int,
    warmup: int,
    layers: int,
    forward_ms: float,
    computation: str,
    store: Path | None,
    timeline: Path | None,
    svg: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Two ranks over limited links: how much of gathers and expert fetches is hidden, and by which queue."""
    from tierstore.bench.overlap import OverlapBench, Stack, run
    from tierstore.bench.overlap_rig import Computation, RigShape
    from tierstore.train.config import TrainConfig

    shape = RigShape(
        layers=layers,
        cached_layers=layers / 2,
        vertical_depth=max(1, layers * 3 // 4),
        forward_s=forward_ms / 1e3,
        computation=Computation(computation),
    )
    place = store or Path("tierstore-bench")
    plan = OverlapBench(
        place=place,
        steps=steps,
        warmup=warmup,
        timeline=timeline,
        svg=svg,
        stack=Stack(stack),
        shape=shape,
        train=load(TrainConfig, config, config_overrides(settings, {"threads": 1})),
    )
    output = Output.for_option(as_json, counts=_COUNTS)
    result = run(plan, output.line)
    output.table(
        f"{result['ranks']} ranks, {stack} layers, links limited",
        (
            "",
            "prefetch",
            "computation",
            "gathers",
            "fetches",
            "step",
            "/ longest",
            "stalled: horizontal",
            "vertical",
        ),
        [
            (
                row["balance"],
                row["prefetch"],
                *(format_seconds(row[f"{what}_s"]) for what in ("computation", "gathers", "fetches", "step")),
                f"{row['ratio']:.3f}",
                *(format_seconds(_stalled_along(row, way)) for way in ("horizontal", "vertical")),
            )
            for row in result["runs"]
        ],
    )
    output.emit(result)


def _stalled_along(run: dict[str, Any], dimension: str) -> float:
    return float(sum(s["step_stall_s"] for s in run["stalls"] if s["cause"].startswith(dimension)))


@bench.command()
@click.option("--ranks", type=int, default=2, show_default=True)
@click.option("--layers", type=int, default=8, show_default=True, help="Dense blocks.")
@click.option("--d-model", type=int, default=128, show_default=True, help="Their width.")
@click.option("--tokens", type=int, default=64, show_default=True, help="Tokens of a step on each rank.")
@click.option("--rounds", type=int, default=7, show_default=True)
@json_option
def collectives(ranks: int, layers: int, d_model: int, tokens: int, rounds: int, as_json: bool) -> None:
    """Fused gathers and gradient buckets against a message a parameter, over ranks on Gloo."""
    from tierstore.bench.collectives import CollectivesBench, render, run

    output = Output.for_option(as_json, counts=_COUNTS)
    result = run(CollectivesBench(ranks=ranks, layers=layers, d_model=d_model, tokens=tokens, rounds=rounds))
    render(result, output)
    output.emit(result)


@bench.command()
@click.option("--requests", type=int, default=2_000_000, show_default=True, help="Of each trace.")
@click.option("--keys", type=int, default=100_000, show_default=True, help="Of the trace of single keys.")
@click.option("--repeats", type=int, default=3, show_default=True, help="Rounds.")
@click.option(
    "--curve-points",
    type=click.IntRange(min=0),
    default=0,
    help="Also time every policy's curve of so many points.",
)
@json_option
def cache(requests: int, keys: int, repeats: int, curve_points: int, as_json: bool) -> None:
    """Requests a second of every cache policy in the simulator.

    --requests 20000000 --repeats 1 --curve-points 10 shows how long all curves of a large trace take.
    """
    from tierstore.bench.cache import run

    output = Output.for_option(as_json, counts=_COUNTS | {"requests", "keys", "points"})
    result = run(
        requests=requests, keys=keys, repeats=repeats, curve_points=curve_points, announce=output.line
    )
    _show_cache(result, output)
    output.emit(result)


def _show_cache(result: dict[str, Any], output: Output) -> None:
    kinds = ("keys", "passes")
    rows = [
        (
            name,
            *(
                f"{found[f'{kind}_requests_per_s'] / 1e6:.1f} M/s"
                if f"{kind}_requests_per_s" in found
                else "-"
                for kind in kinds
            ),
        )
        for name, found in result["policies"].items()
    ]
    title = f"requests a second and thread with {result['capacity_ratio']:.0%} of the footprint (measured)"
    output.table(title, ("policy", "single keys", "layer passes, event-atomic"), rows)
    if "curves" in result:
        timed = result["curves"]
        output.line(
            f"{timed['policies_count']} curves of {timed['points']} points over {result['requests']} requests: "
            f"{format_seconds(timed['elapsed_s'])} on {result['cores']} cores"
        )
