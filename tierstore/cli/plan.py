"""``tierstore plan``: what a run would take on each tier, whether it fits, and how long a step would take.

Nothing is opened, allocated or measured, and torch is not imported, but for `--model` with a directory or config.json,
whose parameters transformers counts, and `--serve` of a store: it answers in under a second. Exit status 1: it does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.models import with_stored_model
from tierstore.cli.options import (
    PATH,
    SIZE,
    config_overrides,
    help_config_option,
    json_option,
    set_option,
)
from tierstore.cli.output import Output
from tierstore.cli.plan_layouts import show_layouts
from tierstore.cli.plan_serving import ServingAsked, server_settings, serving_options, show_serving
from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:  # numpy and LMDB, which listing the commands need not
    from tierstore.plan import Hardware, Plan, Preset, Profile
    from tierstore.plan.foreign import UsePlan, UsesPlan
    from tierstore.plan.predict import Prediction
    from tierstore.plan.uses import Use
    from tierstore.train.config import TrainConfig

_DOES_NOT_FIT = 1


@click.command()
@click.argument("config", required=False, type=PATH)
@click.option("--preset", help="A published model; `--preset list` names them.")
@click.option(
    "--model",
    type=PATH,
    help="A model of transformers: its directory, its config.json, or the store it is in.",
)
@click.option(
    "--for",
    "use",
    type=click.Choice(["full", "lora", "lora-attention", "serve"]),
    help="What an imported model is planned for in detail (default: full, or lora where its experts are frozen).",
)
@click.option("--lora", type=int, help="Rank of low-rank pairs (default: lora.rank, or 16).")
@click.option("--ranks", type=int, default=1, help="Processes that share the model.")
@click.option(
    "--ranks-per-node",
    "--node-ranks",
    "ranks_per_node",
    type=int,
    help="How many of them share a machine (default: all).",
)
@click.option("--layouts", is_flag=True, help="Compare all layouts of --ranks: data, expert, tensor, stages.")
@click.option("--host-budget", type=SIZE, help="Memory for experts, of each rank.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--memory", type=SIZE, help="Memory of a machine (default: of this one).")
@click.option("--disk", type=SIZE, help="Disk space of a machine (default: free under the store).")
@click.option("--device-memory", type=SIZE, help="Memory of one CUDA device (default: not held against it).")
@click.option(
    "--alpha", type=float, help="Share of activated experts in SE-MoE's formulas (default: a step's)."
)
@click.option(
    "--profile",
    type=PATH,
    help="Costs measured by `tierstore bench machine` (default: parallel.profile, or assumed ones).",
)
@serving_options()
@set_option()
@json_option
@help_config_option()
@click.pass_context
def plan(
    ctx: click.Context,
    config: Path | None,
    preset: str | None,
    model: Path | None,
    use: str | None,
    lora: int | None,
    ranks: int,
    ranks_per_node: int | None,
    layouts: bool,
    host_budget: int | None,
    device: str,
    memory: int | None,
    disk: int | None,
    device_memory: int | None,
    alpha: float | None,
    profile: Path | None,
    serving: ServingAsked,
    settings: tuple[str, ...],
    output: Output,
) -> None:
    """Bytes on each tier, whether they fit, the time of a step and its bottleneck, and what to change."""
    from tierstore.plan import ASSUMED, DeviceKind, find_preset, load_profile, machine_limits, plan_run
    from tierstore.plan.uses import DEFAULT_RANK

    if preset is not None and model is not None:
        raise ConfigError("--preset, --model: expected one of them")
    if preset == "list":
        _list_presets(output)
        return
    chosen = None if preset is None else find_preset(preset)
    overrides = config_overrides(settings, {"host_budget": host_budget})
    served = server_settings(overrides) if serving.asked else {}
    run = {name: value for name, value in overrides.items() if name not in served or name == "store"}
    loaded = _load(config, chosen, model, run, ranks)
    measured = profile or loaded.parallel.profile
    costs = load_profile(measured) if measured else ASSUMED
    if serving.asked:
        kind = DeviceKind(device)
        show_serving(loaded, model, serving, costs, output, overrides=served, device=kind)
        return
    share = _sharing(ranks, ranks_per_node)
    limits = machine_limits(loaded.store, sharing=share, memory=memory, disk=disk, device=device_memory)
    if (chosen or model) is not None and "host_budget" not in overrides and config is None:
        loaded = replace(loaded, host_budget=max(limits.memory // 2, 1))
    if layouts:
        show_layouts(loaded, costs, ranks, share, limits.memory // share, output)
        return
    kind = DeviceKind(device)
    made = plan_run(
        loaded,
        limits,
        preset=chosen,
        ranks=ranks,
        device=kind,
        profile=costs,
        alpha=alpha,
        use=_use(loaded, use, lora),
        lora=(loaded.lora.rank or DEFAULT_RANK) if lora is None else lora,
    )
    _show(made, costs, output)
    output.emit(made.as_json())
    ctx.exit(0 if made.verdict.fits else _DOES_NOT_FIT)


def _load(
    config: Path | None,
    preset: Preset | None,
    model: Path | None,
    overrides: Mapping[str, object],
    ranks: int,
) -> TrainConfig:
    """The run of the file ``config``, of a published model or of the one at ``model``."""
    from tierstore.train import TrainConfig

    published: dict[str, object] = {}
    if preset is not None:  # one sequence a rank, unless the file or an option says otherwise
        published = {**preset.settings, **({} if config else {"data.batch_size": max(ranks, 1)})}
    elif model is not None and config is None:
        published = {"data.batch_size": max(ranks, 1)}
    loaded = load(TrainConfig, config, {**published, **overrides})
    return loaded if preset is not None else _with_model(loaded, model)


def _sharing(ranks: int, ranks_per_node: int | None) -> int:
    """How many ranks share a machine."""
    share = ranks_per_node or max(ranks, 1)
    if not 1 <= share <= max(ranks, 1):
        raise ConfigError(f"--ranks-per-node: expected 1 to {ranks} (--ranks), got {share}")
    return share


def _with_model(config: TrainConfig, path: Path | None) -> TrainConfig:
    """``config`` with the model at ``path``, or the one that its store was imported with."""
    from tierstore.model.config import ModelConfig

    if path is None:
        return with_stored_model(config)
    from tierstore.hf.spec import model_of

    if config.model != ModelConfig():
        raise ConfigError(
            "--model: [model] describes the built-in model; [finetune] is what a run chooses of another"
        )
    return replace(config, model=model_of(path, config.finetune))


def _use(config: TrainConfig, asked: str | None, rank: int | None) -> Use:
    """What is planned in detail."""
    from tierstore.hf.manifest import Weights
    from tierstore.hf.spec import HfSpec
    from tierstore.plan.uses import Use

    if not isinstance(config.model, HfSpec):
        if asked is not None or rank is not None:
            raise ConfigError("--for, --lora: expected an imported model (--model), got the built-in one")
        return Use.FULL
    if asked is not None:
        return Use(asked)
    if config.lora.enabled and not config.lora.experts:
        return Use.LORA_ATTENTION
    frozen = config.model.manifest.weights is Weights.FROZEN
    return Use.LORA if frozen or config.lora.enabled else Use.FULL


def _list_presets(output: Output) -> None:
    from tierstore.plan.presets import PRESETS

    rows = [
        (
            name,
            f"{one.architecture.parameters / 1e9:.1f} G",
            f"{one.published / 1e9:.1f} G",
            one.source,
            one.note,
        )
        for name, one in PRESETS.items()
    ]
    output.table("", ("preset", "parameters", "published", "source", "note"), rows)
    output.emit(
        {
            "presets": [
                {
                    "name": name,
                    "source": one.source,
                    "parameters": one.architecture.parameters,
                    "published_parameters_count": one.published,
                    "note": one.note,
                }
                for name, one in PRESETS.items()
            ]
        }
    )


# For people -------------------------------------------------------------------------------------------------


def _parameters(count: int) -> str:
    return (
        f"{count / 1e9:,.1f} G" if count >= 1e10 else f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _show(made: Plan, costs: Profile, output: Output) -> None:
    model = made.setting.model
    output.line(
        f"{_parameters(model.parameters)} parameters: {_parameters(model.dense)} dense, "
        f"{_parameters(model.sparse)} in {model.records} experts; {_parameters(model.active)} active"
    )
    if made.preset is not None:
        output.line(
            f"published: {made.preset.published / 1e9:.5g} G ({made.preset.source}); {made.preset.note}"
        )
    if made.uses is not None:
        _show_uses(made.uses, output)
        output.line(f"in detail, {made.setting.usage.use.value}:")
    _show_bytes(made, output)
    paper = made.paper
    output.line(
        f"by SE-MoE's formulas, all ranks, alpha {made.alpha:.3g}: GPU {format_bytes(paper.gpu)} (16 D + 4 alpha S / L), "
        f"CPU {format_bytes(paper.cpu)} (16 alpha S), SSD {format_bytes(paper.ssd)} (12 S)"
    )
    _show_prediction(made, costs, output)
    _show_order(made, output)
    _show_degrees(made, output)
    _show_vocabulary(made, output)
    for line in made.tensor.lines() if made.tensor is not None else ():
        output.line(line)
    if made.tasks is not None:
        output.line(f"tasks: {made.tasks.describe()}")
    if made.verdict.fits:
        output.line("it fits")
        return
    for shortfall in made.verdict.shortfalls:
        output.line(f"does not fit: {shortfall}")
    if made.hardware is not None:
        _show_hardware(made, made.hardware, output)
    if made.remedy is not None:
        changes = "; ".join(f"{change.text} ({change.effect.value})" for change in made.remedy.changes)
        output.line(f"shortest way to make it fit: {changes}")


def _show_uses(made: UsesPlan, output: Output) -> None:
    manifest = made.spec.manifest
    share = manifest.expert_parameters / manifest.total_parameters
    kept = "" if manifest.quantization.value == "none" else f", {manifest.quantization.value} dequantised"
    output.line(
        f"{manifest.architecture}: {manifest.total_parameters:,} parameters, {share:.1%} of them in experts; "
        f"computes in {manifest.compute.value}{kept}"
    )
    rows = [_use_row(use.use.value, use, use.prediction) for use in made.uses]
    rows += [_use_row("serve: one token", use, use.token) for use in made.uses if use.token is not None]
    titles = ("use", "memory", "disk", "fits", "reads", "writes", "a step or pass", "tokens/s")
    output.table("Uses, each rank", titles, rows)
    pairs = made.pairs
    output.line(f"frozen experts: {format_bytes(made.frozen)} on disk, one copy")
    output.line(
        f"pairs of rank {pairs.rank}: {_parameters(pairs.attention)} parameters of attention, "
        f"{_parameters(pairs.experts)} of experts, whose records take {format_bytes(pairs.records)} of disk; "
        f"in memory they would take {format_bytes(pairs.resident)}: "
        f"pairs fit in memory: {'yes' if pairs.in_memory else 'no'}"
    )


def _use_row(name: str, use: UsePlan, made: Prediction | None) -> tuple[str, ...]:
    def size(nbytes: int | None) -> str:
        return "-" if nbytes is None else format_bytes(nbytes)

    fits = "yes" if use.verdict.fits else "no: " + ", ".join(s.place for s in use.verdict.shortfalls)
    if made is None:
        return (name, size(use.memory), size(use.disk), fits, "-", "-", "-", "-")
    moved = made.traffic
    return (
        name,
        size(use.memory),
        size(use.disk),
        fits,
        format_bytes(moved.read_bytes),
        format_bytes(moved.written_bytes),
        format_seconds(made.step_s),
        _number(made.tokens_per_s),
    )


def _show_hardware(made: Plan, hardware: Hardware, output: Output) -> None:
    """What is missing on which tier, and a machine that has it."""
    sharing = f" for its {made.limits.sharing} ranks" if made.limits.sharing > 1 else ""
    tiers = {
        "memory": "host tier" if hardware.device is not None else "host and device tiers",
        "device memory": "device tier",
        "disk": "nvme tier",
    }
    budgets = " and ".join(change.text for change in hardware.changes)
    output.line(
        "no three changes make it fit" + (f"; with {budgets}, the least that starts:" if budgets else ":")
    )
    for shortfall in hardware.shortfalls:
        missing = format_bytes(shortfall.needed - shortfall.limit)
        output.line(f"each rank misses {missing} on the {tiers[shortfall.place]} ({shortfall})")
    device = "" if hardware.device is None else f", and {format_bytes(hardware.device)} on each device"
    output.line(
        f"hardware that would do: a machine with {format_bytes(hardware.memory)} of memory and "
        f"{format_bytes(hardware.disk)} of disk{sharing}{device}"
    )


def _show_bytes(made: Plan, output: Output) -> None:
    from tierstore.plan.capacity import TIERS

    taken = made.verdict.capacity
    if taken is None:
        return
    rows = [
        (term.tier.value, term.name, format_bytes(term.nbytes), term.evidence.value, term.formula)
        for term in taken.terms
    ]
    title = "one rank" if made.setting.ranks.count == 1 else f"each of {made.setting.ranks.count} ranks"
    output.table(f"Bytes of {title}", ("tier", "what", "bytes", "evidence", "formula"), rows)
    totals = ", ".join(f"{tier.value} {format_bytes(taken.total(tier))}" for tier in TIERS)
    output.line(f"in all: {totals}")


def _show_order(made: Plan, output: Output) -> None:
    if made.order is None:
        return
    for line in (made.order.describe(), made.order.advice()):
        if line is not None:
            output.line(line)


def _show_degrees(made: Plan, output: Output) -> None:
    """In how many chunks rows travel to experts, forward and backward."""
    prediction = made.prediction
    if prediction is None or prediction.degrees is None:
        return
    degrees = prediction.degrees
    output.table(
        f"Chunks of a MoE layer's pass, at most {degrees.most} ({degrees.evidence.value})",
        ("pass", "best", "a pass", "in one chunk"),
        [
            (
                one.phase.name.lower(),
                one.best.degree,
                format_seconds(one.best.seconds),
                format_seconds(one.one_s),
            )
            for one in degrees.passes
        ],
    )
    for one in degrees.passes:
        if one.best.wanted > one.best.degree:
            output.line(
                f"{one.phase.name.lower()}: {one.best.wanted} chunks would be best; a rank owns {degrees.most} experts"
            )
    taken = ", ".join(f"{count} {phase.name.lower()}" for phase, count in degrees.taken.items())
    why = "auto: the best number, where it saves 2%" if degrees.auto else "parallel.pipeline_degree"
    line, saved = f"chunks of a step: {taken} ({why})", prediction.chunks_save_s
    if max(degrees.taken.values()) > 1:
        line += (
            f": it takes {format_seconds(prediction.step_s)}, and in one chunk "
            f"{format_seconds(prediction.one_chunk_s)}: they {'save' if saved >= 0 else 'cost'} "
            f"{format_seconds(abs(saved))}"
        )
    output.line(line)


def _show_vocabulary(made: Plan, output: Output) -> None:
    choice = made.setting.vocabulary
    if choice.cost is None:
        return
    cost = choice.cost
    output.line(str(choice.describe()))
    output.line(
        f"a table gathered: each rank sends {format_bytes(cost.gathered_sent)} a step and needs "
        f"{format_bytes(cost.gathered_memory)} beside its slices; rows partitioned: "
        f"{format_bytes(cost.embedding_sent)} as the embedding, {format_bytes(cost.head_sent)} as the head, and "
        f"{format_bytes(cost.divided_memory)}"
    )


def _show_prediction(made: Plan, costs: Profile, output: Output) -> None:
    from tierstore.prefetch.operations import Resource

    prediction = made.prediction
    if prediction is None:
        return
    traffic = prediction.traffic
    output.line(
        f"a step reads {format_bytes(traffic.read_bytes)} and writes {format_bytes(traffic.written_bytes)} "
        f"({traffic.evidence.value}; {traffic.active:.0%} of the experts are reached)"
    )
    busy = ", ".join(
        f"{resource.value} {prediction.busy_ratio[resource]:.0%}"
        for resource in Resource
        if prediction.busy_ratio[resource] >= 0.005
    )
    output.line(
        f"a step takes {format_seconds(prediction.step_s)}, {_number(prediction.tokens_per_s)} tokens/s "
        f"({prediction.evidence.value}: {costs.machine}); bottleneck: {prediction.bottleneck.value}; busy: {busy}"
    )
