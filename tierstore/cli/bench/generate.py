"""``tierstore bench generate``: prefill and decoding by tierstore and by others, in turns, under one memory limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.bench.generation.registry import CONTESTANTS
from tierstore.cli.bench.results import (
    CHECK_FAILED,
    WORK_DIRECTORY,
    Reporting,
    results_options,
    work_directory_option,
)
from tierstore.cli.options import EXISTING_DIRECTORY, FILE, SIZE, set_option
from tierstore.cli.output import Output
from tierstore.errors import ConfigError
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.generation.figures import GenerateResult, SpeedFigures


@click.command()
@click.argument("model", type=EXISTING_DIRECTORY, metavar="MODEL_DIR_OR_STORE")
@click.option(
    "--rivals",
    "names",
    metavar="NAME,..",
    default=",".join(CONTESTANTS),
    show_default=True,
    help="Who takes part.",
)
@click.option("--imported", type=EXISTING_DIRECTORY, help="A store of MODEL_DIR that is there already.")
@click.option("--gguf", type=FILE, help="A GGUF file of the same weights (default: made, for Qwen3-MoE).")
@click.option("--memory", type=SIZE, default="1240MiB", help="Memory of each confined process (0: no limit).")
@click.option("--host-budget", type=SIZE, default="512MiB", help="Of that, tierstore's memory for experts.")
@click.option("--batch", default="1,8", show_default=True, help="Sequences of a batch, several with commas.")
@click.option("--prompt-tokens", type=int, default=32, show_default=True)
@click.option("--new-tokens", type=int, default=16, show_default=True)
@click.option("--rounds", type=int, default=3, show_default=True, help="Each begins with another one.")
@click.option("--threads", type=int, default=0, help="Of everyone (0: one for each core).")
@click.option(
    "--read-ahead",
    type=SIZE,
    default=0,
    help="Set the disk's readahead while measuring: mapped files live by it (0: as it is).",
)
@click.option(
    "--load",
    type=float,
    default=0.0,
    help="Then open-loop load on tierstore, at this share of its capacity (0: none).",
)
@click.option("--requests", type=int, default=40, show_default=True, help="Requests of that load.")
@click.option("--timeout", type=float, default=900.0, help="Seconds within which each must answer.")
@work_directory_option
@set_option()
@results_options()
def generate(
    model: Path,
    names: str,
    imported: Path | None,
    gguf: Path | None,
    memory: int,
    host_budget: int,
    batch: str,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    threads: int,
    read_ahead: int,
    load: float,
    requests: int,
    timeout: float,
    store: Path | None,
    settings: tuple[str, ...],
    reporting: Reporting,
) -> int:
    """Prefill and decoding by tierstore, transformers, accelerate and llama.cpp, in turns, each turn its own process.

    Who is not installed or dies is left out with a reason. Exit status 1: tierstore's choices of tokens are not those of
    transformers.
    """
    from tierstore.bench.generation.figures import measurements
    from tierstore.bench.generation.models import BenchModel
    from tierstore.bench.generation.run import GenerationBench, run

    directory = store or WORK_DIRECTORY
    bench = GenerationBench(
        contestants=tuple(filter(None, names.split(","))),
        memory=memory,
        host_budget=host_budget,
        batches=_sizes(batch),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        rounds=rounds,
        threads=threads,
        read_ahead=read_ahead,
        load=load,
        requests=requests,
        timeout_s=timeout,
        settings=settings,
    )
    session = reporting.begin(directory=directory)
    result = run(BenchModel(model, store=imported, gguf=gguf), bench, directory, session.output.line)
    show_generate(result, session.output)
    session.end(result, measurements(result))
    return 0 if result.same_choices else CHECK_FAILED


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--batch: expected whole numbers separated by commas, got {text!r}") from error


def show_generate(result: GenerateResult, output: Output) -> None:
    """Tables and ratios, for people."""
    ahead = "unknown" if result.read_ahead_bytes is None else format_bytes(result.read_ahead_bytes)
    output.line(
        f"memory: {format_bytes(result.memory_limit_bytes)}, by {result.confined_by}; page cache: {result.page_cache}; "
        f"the disk's readahead: {ahead}"
    )
    columns = (
        "",
        "prefill tokens/s",
        "decode tokens/s",
        "first token",
        "step p50",
        "step p99",
        "read a token",
        "hits",
        "peak resident",
        "peak of the group",
    )
    for batch in dict.fromkeys(one.batch_count for one in result.speeds):
        output.table(
            f"{result.model}, batch {batch}: {result.prompt_tokens_count} tokens of prompt, "
            f"{result.new_tokens_count} of decoding, {result.threads} threads, {result.rounds} rounds",
            columns,
            [_row(one) for one in result.speeds if one.batch_count == batch],
        )
    _show_notes(result, output)
    for against in result.against:
        memory = (
            "" if against.peak_group_ratio is None else f", peak of the group {against.peak_group_ratio:.2f}"
        )
        output.line(
            f"batch {against.batch_count}: tierstore / {against.rival}: prefill {against.prefill_ratio:.2f}, decode "
            f"{against.decode_ratio:.2f}{memory}"
        )
    for bound in result.bounds:
        in_ram = "" if bound.in_ram_step_s is None else f", in RAM {format_seconds(bound.in_ram_step_s)}"
        output.line(
            f"batch {bound.batch_count}: decode step / bound {bound.step_to_bound_ratio:.3f}; bound "
            f"{format_seconds(bound.bound_s)}: {format_bytes(bound.compulsory_step_read_bytes)} ({bound.compulsory_policy}) "
            f"at {format_bytes(bound.disk_bytes_per_s)}/s take {format_seconds(bound.compulsory_s)}{in_ram}; who knew the "
            f"future would read {format_bytes(bound.clairvoyant_step_read_bytes)}"
        )
    if (load := result.load) is not None:
        output.line(
            f"{load.requests} requests at {load.capacity_ratio:.0%} of capacity, {load.requests_per_s:.2f} a second: first "
            f"token p50 {format_seconds(load.first_token_p50_s)}, p99 {format_seconds(load.first_token_p99_s)}; between "
            f"tokens p50 {format_seconds(load.between_tokens_p50_s)}, p99 {format_seconds(load.between_tokens_p99_s)}; "
            f"{load.most_waiting_count} waited at most"
        )


def _show_notes(result: GenerateResult, output: Output) -> None:
    for one in {one.contestant: one for one in result.speeds}.values():
        if one.reason is not None:
            output.line(f"{one.title}: {one.outcome.value}: {one.reason}")
        for line in one.description:
            output.line(f"{one.title}: {line}")
    for one in result.speeds:
        if one.chosen_same_ratio is not None and one.contestant != result.reference:
            output.line(
                f"batch {one.batch_count}: {one.title}: {one.chosen_same_ratio:.1%} of the choices are {result.reference}'s"
            )


def _row(one: SpeedFigures) -> tuple[str, ...]:
    def size(nbytes: int | None) -> str:
        return "-" if nbytes is None else format_bytes(nbytes)

    def seconds(value: float | None) -> str:
        return "-" if value is None else format_seconds(value)

    if one.prefill_tokens_per_s is None or one.decode_tokens_per_s is None:
        return (one.title, one.outcome.value, *["-"] * 8)
    return (
        one.title,
        f"{one.prefill_tokens_per_s:.2f}",
        f"{one.decode_tokens_per_s:.2f}",
        seconds(one.first_token_s),
        seconds(one.step_p50_s),
        seconds(one.step_p99_s),
        size(one.decode_token_read_bytes),
        "-" if one.hit_ratio is None else f"{one.hit_ratio:.1%}",
        size(one.peak_resident_bytes),
        size(one.peak_group_bytes),
    )
