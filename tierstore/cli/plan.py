"""``tierstore plan``: the bytes of a run on each tier, whether it fits, and the time of a step.

It opens, allocates and measures nothing, and answers in under a second without importing torch. The exceptions are `--model`
with a directory or config.json (transformers counts the parameters) and `--serve` of a store. Exit status 1: does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.main import CHECK_FAILED, DONE
from tierstore.cli.options import (
    PATH,
    config_options,
    config_overrides,
    dataclass_options,
    deployed_settings,
    help_config_option,
    json_option,
    set_option,
    with_stored_model,
)
from tierstore.cli.output import Output
from tierstore.cli.plan_tables import show_plan
from tierstore.config import PathKind, load, option
from tierstore.errors import ConfigError
from tierstore.plan.capacity import DEFAULT_RANK, Use
from tierstore.tiers.slots import DeviceKind
from tierstore.train.config import TrainConfig
from tierstore.units import format_bytes, format_seconds, parse_size

if TYPE_CHECKING:  # these import numpy and LMDB, which --help must not load
    from tierstore.plan import Preset, Profile
    from tierstore.plan.fitting import Limits
    from tierstore.plan.layouts import LayoutComparison, LayoutCost
    from tierstore.serve.opening import ServedStore
    from tierstore.serve.planning import PassPlan


@dataclass(frozen=True, kw_only=True)
class _Question:
    """What to plan, and for which machine."""

    preset: str | None = option(None, "Published model; `--preset list` shows the names.")
    model: Path | None = option(
        None, "Hugging Face model: its directory, its config.json, or a store that holds it."
    )
    use: Use | None = option(
        None,
        "Use of an imported model (default: full; lora if configured or if experts are frozen).",
        "--for",
    )
    lora: int | None = option(None, "Rank of the LoRA pairs (default: lora.rank, or 16).")
    ranks: int = option(1, "Ranks (processes).")
    ranks_per_node: int | None = option(
        None, "Ranks on one machine (default: all).", "--ranks-per-node", "--node-ranks"
    )
    layouts: bool = option(False, "Compare all layouts of --ranks.")
    device: DeviceKind | None = option(
        None, "Device that computes (default: cuda for a preset with GPUs, else cpu)."
    )
    memory: int | None = option(None, "Memory of one machine (default: this machine's).", size=True)
    disk: int | None = option(
        None, "Disk space of one machine (default: free space under the store).", size=True
    )
    device_memory: int | None = option(
        None, "Memory of one CUDA device (default: a preset's GPU's, or not checked).", size=True
    )
    alpha: float | None = option(
        None, "Share of activated experts, 0 to 1, in SE-MoE's formulas (default: a step's)."
    )
    profile: Path | None = option(
        None,
        "Profile of `bench machine`, or a GPU's name (default: parallel.profile, a preset's GPU, or assumed costs).",
    )
    serve: bool = option(False, "Plan serving of an imported model at several host budgets.")
    batch: int = option(1, "With --serve: sequences in a batch.")
    prompt_tokens: int = option(32, "With --serve: tokens in each prompt.")
    context: int = option(
        0,
        "With --serve: most tokens in a sequence (default: 4096, or the model's limit).",
        click={"show_default": False},
    )
    budgets: str = option(
        "",
        "With --serve: host budgets to compare (default: --host-budget, or a range).",
        click={"metavar": "SIZE,..", "show_default": False},
    )
    trace: Path | None = option(
        None,
        "With --serve: replay this trace of `generate --record-trace` (default: even routing).",
        path=PathKind.FILE,
    )

    @property
    def sharing(self) -> int:
        """Ranks on one machine. Raises ConfigError."""
        share, ranks = self.ranks_per_node or max(self.ranks, 1), max(self.ranks, 1)
        if not 1 <= share <= ranks:
            raise ConfigError(f"--ranks-per-node: expected 1 to {self.ranks} (--ranks), got {share}")
        return share


@click.command()
@click.argument("config", required=False, type=PATH)
@dataclass_options(_Question, "question")
@config_options(TrainConfig, {"--host-budget": "host_budget"})
@set_option()
@json_option
@help_config_option(TrainConfig)
@click.pass_context
def plan(
    ctx: click.Context,
    config: Path | None,
    question: _Question,
    given: dict[str, object],
    settings: tuple[str, ...],
    output: Output,
) -> None:
    """Plan a run: bytes on each tier, whether they fit, step time, its bottleneck, and what to change."""
    from tierstore.plan import ASSUMED, find_preset, find_profile, machine_limits, plan_run

    ranks, model = question.ranks, question.model
    if question.preset is not None and model is not None:
        raise ConfigError("--preset and --model cannot be combined")
    if question.preset == "list":
        _list_presets(output)
        return
    preset = None if question.preset is None else find_preset(question.preset)
    overrides = config_overrides(settings, given)
    served = _server_settings(overrides) if question.serve else {}
    run = {name: value for name, value in overrides.items() if name not in served or name == "store"}
    loaded = _load(config, preset, model, run, ranks)
    published = preset if preset and preset.gpu and question.device is not DeviceKind.CPU else None
    device = question.device or (DeviceKind.CUDA if published else DeviceKind.CPU)
    measured = question.profile or loaded.parallel.profile
    gpu = published.gpu if published and not measured else None
    named = Path(gpu) if gpu else measured
    costs = find_profile(named) if named else ASSUMED
    if question.serve:
        _show_serving(loaded, question, costs, device, output, overrides=served)
        return
    share = question.sharing
    limits = machine_limits(
        loaded.store,
        sharing=share,
        memory=question.memory,
        disk=question.disk,
        device=question.device_memory or (published.gpu_memory if published and gpu else None),
    )
    if (preset or model) is not None and "host_budget" not in overrides and config is None:
        loaded = replace(loaded, host_budget=max(limits.memory // 2, 1))
    if question.layouts:
        if not loaded.host_budget:
            loaded = replace(loaded, host_budget=max(loaded.memory // 2, 1))
        _show_layouts(loaded, costs, ranks, share, device, limits, output)
        return
    made = plan_run(
        loaded,
        limits,
        preset=preset,
        ranks=ranks,
        device=device,
        profile=costs,
        alpha=question.alpha,
        use=_use(loaded, question.use, question.lora),
        lora=(loaded.lora.rank or DEFAULT_RANK) if question.lora is None else question.lora,
    )
    show_plan(made, costs, output)
    output.emit(made.as_json())
    ctx.exit(DONE if made.verdict.fits else CHECK_FAILED)


def _load(
    config: Path | None,
    preset: Preset | None,
    model: Path | None,
    overrides: Mapping[str, object],
    ranks: int,
) -> TrainConfig:
    """The configuration of the run: from the file ``config``, ``preset``, or the model at ``model``, or else with the
    imported model of its store.
    """
    from tierstore.hf.spec import model_of
    from tierstore.model.config import ModelConfig

    published: dict[str, object] = dict(preset.settings) if preset is not None else {}
    if (preset or model) is not None and config is None:  # one sequence per rank by default
        published["data.batch_size"] = max(ranks, 1)
    loaded = load(TrainConfig, config, {**published, **overrides})
    if preset is not None:
        return loaded
    if model is None:
        return with_stored_model(loaded)
    if loaded.model != ModelConfig():
        raise ConfigError(
            "--model: [model] configures the built-in model only; use [finetune] for an imported one"
        )
    return replace(loaded, model=model_of(model, loaded.finetune))


def _use(config: TrainConfig, asked: Use | None, rank: int | None) -> Use:
    """The use to plan in detail."""
    from tierstore.hf.manifest import Weights
    from tierstore.hf.spec import HfSpec

    if not isinstance(config.model, HfSpec):
        if asked is not None or rank is not None:
            raise ConfigError("--for, --lora: expected an imported model (--model), got the built-in one")
        return Use.FULL
    if asked is not None:
        return asked
    if config.lora.enabled and not config.lora.experts:
        return Use.LORA_ATTENTION
    frozen = config.model.manifest.weights is Weights.FROZEN
    return Use.LORA if frozen or config.lora.enabled else Use.FULL


def _list_presets(output: Output) -> None:
    from tierstore.plan.presets import PRESETS

    rows, found = [], []
    for name, preset in PRESETS.items():
        count = preset.architecture.parameters
        rows.append(
            (name, f"{count / 1e9:.1f} G", f"{preset.published / 1e9:.1f} G", preset.source, preset.note)
        )
        found.append(
            {
                "name": name,
                "source": preset.source,
                "parameters": count,
                "published_parameters_count": preset.published,
                "note": preset.note,
            }
        )
    output.table("", ("preset", "parameters", "published", "source", "note"), rows)
    output.emit({"presets": found})


# Layouts ----------------------------------------------------------------------------------------------------


_LAYOUT_TITLES = (
    "layout",
    "step",
    "slower by",
    "bubble",
    "sent within a node",
    "between nodes",
    "memory per rank",
    "disk per rank",
)
#: Variants of the best arrangement that are shown.
_VARIANTS = 12


def _show_layouts(
    config: TrainConfig,
    profile: Profile,
    ranks: int,
    node_ranks: int,
    device: DeviceKind,
    limits: Limits,
    output: Output,
) -> None:
    """Show the fastest layout of each arrangement of ranks, and the variants of the best one. Layouts whose ranks need more
    than their share of a node's memory are marked.
    """
    from tierstore.plan.layouts import best_of_each_kind, compare_layouts

    memory = limits.memory // node_ranks
    with output.progress(label="layouts") as progress:
        found = compare_layouts(
            config,
            profile,
            ranks=ranks,
            node_ranks=node_ranks,
            device=device,
            device_memory=limits.device,
            progress=progress.update,
        )
    title = f"{ranks} ranks, {node_ranks} per node: the fastest of each arrangement (sent: bytes per rank and step)"
    _layout_table(title, best_of_each_kind(found.costs), found, memory, output)
    variants = found.variants()
    if len(variants) > 1:
        _layout_table("Variants of the best arrangement", variants[:_VARIANTS], found, memory, output)
    if len(variants) > _VARIANTS:
        output.line(f"and {len(variants) - _VARIANTS} more, in --json")
    reasons: dict[str, str] = {}
    for choice, why in found.refused:
        reasons.setdefault(why, choice.name)
    for why, name in reasons.items():
        output.line(f"not possible: {name}: {why}")
    settings = " ".join(f"--set {name}={value}" for name, value in found.best.choice.settings.items())
    output.line(f"fastest: tierstore train {settings}")
    output.emit({"evidence": found.best.evidence.value, "rank_memory_bytes": memory, **found.as_json()})


def _layout_table(
    title: str, costs: Sequence[LayoutCost], found: LayoutComparison, memory: int, output: Output
) -> None:
    rows = []
    for cost in costs:
        lost = f"{format_seconds(cost.step_s - found.best.step_s)} ({found.loses(cost):.1%})"
        rows.append(
            (
                cost.choice.name,
                format_seconds(cost.step_s),
                "-" if cost is found.best else lost,
                f"{cost.bubble_ratio:.0%}",
                format_bytes(cost.sent["sent_within_node_bytes"]),
                format_bytes(cost.sent["sent_across_nodes_bytes"]),
                format_bytes(cost.memory_bytes) + (" (too much)" if cost.memory_bytes > memory else ""),
                format_bytes(cost.disk_bytes),
            )
        )
    output.table(title, _LAYOUT_TITLES, rows)


# Serving ----------------------------------------------------------------------------------------------------


def _server_settings(overrides: Mapping[str, object]) -> dict[str, object]:
    """The ``overrides`` whose keys belong to ``ServeConfig``. Raises ConfigError for those that an option replaces."""
    from tierstore.serve.config import ServeConfig

    for key, name in (("batch.sequences", "--batch"), ("batch.context", "--context")):
        if key in overrides:
            raise ConfigError(f"{key}: expected {name} instead, which a plan of serving uses")
    names = {one.name for one in fields(ServeConfig)}
    return {key: value for key, value in overrides.items() if key.partition(".")[0] in names}


def _show_serving(
    config: TrainConfig,
    question: _Question,
    costs: Profile,
    device: DeviceKind,
    output: Output,
    *,
    overrides: Mapping[str, object],
) -> None:
    """Plan serving of the imported model of ``config``, as a table and as JSON. ``overrides``: ``ServeConfig`` keys that win
    over the settings of ``tierstore deploy``.
    """
    from tierstore.hf.spec import HfSpec
    from tierstore.serve.config import ServeConfig
    from tierstore.serve.planning import ServedWork, plan_serving

    if not isinstance(config.model, HfSpec):
        raise ConfigError("--serve: expected an imported model (--model), got the built-in one")
    work = ServedWork(
        sequences=question.batch,
        prompt_tokens=question.prompt_tokens,
        context=question.context,
        trace=question.trace,
    )
    store = config.store if question.model is None else question.model
    stored = _stored(store)
    spec = config.model if stored is None else stored.spec
    assert isinstance(spec, HfSpec)
    served = load(ServeConfig, None, {**deployed_settings(store), **overrides})
    budgets = [parse_size(part, name="--budgets") for part in question.budgets.split(",") if part]
    if not budgets and "host_budget" in overrides:
        budgets = [served.host_budget]
    made = plan_serving(
        spec,
        work,
        costs,
        budgets=budgets,
        config=served,
        device=device,
        device_memory=question.device_memory,
        stored=stored,
    )
    copied = any(one.slots_count for one in made.budgets)
    routing = "even routing (no --trace)" if question.trace is None else f"the passes of {question.trace}"
    rows = [
        (
            format_bytes(one.host_budget_bytes),
            f"{one.experts_ratio:.0%}",
            format_bytes(one.memory_bytes),
            *_pass_cells(one.prefill),
            *_pass_cells(one.decode),
            *((str(one.slots_count), f"{one.decode.copied_count:.1f}") if copied else ()),
            format_seconds(one.decode.pass_s),
        )
        for one in made.budgets
    ]
    output.table(
        f"Serving, batch {question.batch}, prompts of {question.prompt_tokens} tokens, with {routing} "
        f"({made.evidence.value}: {made.machine})",
        (
            *("host budget", "experts", "memory", "prefill tokens/s", "missed", "read per prefill"),
            *("decode tokens/s", "missed", "read per step"),
            *(("device slots", "copied per step") if copied else ()),
            "step",
        ),
        rows,
    )
    output.line(
        f"memory besides the experts: dense {format_bytes(made.dense_bytes)}, keys and values "
        f"({made.context_tokens_count} tokens per sequence) {format_bytes(made.keys_and_values_bytes)}, process "
        f"{format_bytes(made.process_bytes)}"
    )
    if made.missed_records_count:
        output.line(
            f"{made.missed_records_count} records have missed optimizer steps: on each fetch, one is read in full and its "
            "steps are replayed (tierstore deploy removes missed steps)"
        )
    output.emit(vars(made))


def _pass_cells(made: PassPlan | None) -> tuple[str, str, str]:
    if made is None:
        return ("-", "-", "-")
    missed = (
        made.missed_count / made.asked_count if made.asked_count else 0.0
    )  # no request: all layers of a ring are on the device
    return (f"{made.tokens_per_s:.1f}", f"{missed:.1%}", format_bytes(made.read_bytes))


def _stored(store: Path) -> ServedStore | None:
    """The model in ``store`` as a server opens it; None if there is no store."""
    from tierstore.errors import StoreMissingError
    from tierstore.serve.opening import read_stored

    try:
        return read_stored(store)
    except (StoreMissingError, FileNotFoundError, NotADirectoryError):
        return None
