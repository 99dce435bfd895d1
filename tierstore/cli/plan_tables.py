"""The tables and lines that ``tierstore plan`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.cli.output import Output
from tierstore.plan.order import order_advice, order_lines
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:  # these import numpy and LMDB, which --help must not load
    from tierstore.plan import Hardware, Plan, Profile
    from tierstore.plan.predict import Prediction
    from tierstore.plan.report import UsePlan, UsesPlan


def _parameters(count: int) -> str:
    return (
        f"{count / 1e9:,.1f} G" if count >= 1e10 else f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def show_plan(made: Plan, costs: Profile, output: Output) -> None:
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
        output.line(f"details of the use {made.setting.usage.use.value}:")
    _show_bytes(made, output)
    gpu, cpu, ssd = (format_bytes(made.paper[f"{tier}_bytes"]) for tier in ("gpu", "cpu", "ssd"))
    output.line(
        f"SE-MoE's formulas, all ranks, alpha {made.alpha:.3g}: GPU {gpu} (16 D + 4 alpha S / L), "
        f"CPU {cpu} (16 alpha S), SSD {ssd} (12 S)"
    )
    _show_prediction(made, costs, output)
    if made.order is not None:
        for line in (*order_lines(made.order), order_advice(made.order)):
            if line is not None:
                output.line(line)
    if made.proposed_step is not None:
        output.line(made.proposed_step.describe())
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
    rows = [_use_row(use.setting.usage.use.value, use, use.prediction) for use in made.uses]
    rows += [_use_row("serve: one token", use, use.token) for use in made.uses if use.token is not None]
    titles = ("use", "memory", "disk", "fits", "reads", "writes", "step or pass", "tokens/s")
    output.table("Uses (per rank)", titles, rows)
    pairs = made.pairs
    output.line(f"frozen experts: {format_bytes(made.frozen)} on disk, one copy")
    output.line(
        f"LoRA pairs of rank {pairs['rank_count']}: {_parameters(pairs['attention_parameters_count'])} parameters for "
        f"attention, {_parameters(pairs['expert_parameters_count'])} for experts; the experts' pairs take "
        f"{format_bytes(pairs['record_bytes'])} on disk, or {format_bytes(pairs['resident_bytes'])} in memory; "
        f"pairs fit in memory: {'yes' if pairs['fits_in_memory'] else 'no'}"
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
    """Show what each rank lacks on which tier, and the smallest machine on which the run fits."""
    sharing = f" for its {made.limits.sharing} ranks" if made.limits.sharing > 1 else ""
    tiers = {
        "memory": "host tier" if hardware.device is not None else "host and device tiers",
        "device memory": "device tier",
        "disk": "nvme tier",
    }
    budgets = " and ".join(change.text for change in hardware.changes)
    output.line(
        "no set of three changes makes it fit" + (f"; with {budgets}, the minimum:" if budgets else ":")
    )
    for shortfall in hardware.shortfalls:
        missing = format_bytes(shortfall.needed - shortfall.limit)
        output.line(f"each rank lacks {missing} on the {tiers[shortfall.place]} ({shortfall})")
    device = "" if hardware.device is None else f", and {format_bytes(hardware.device)} on each device"
    output.line(
        f"sufficient hardware: a machine with {format_bytes(hardware.memory)} of memory and "
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
    title = "one rank" if made.setting.ranks == 1 else f"each of {made.setting.ranks} ranks"
    output.table(f"Bytes of {title}", ("tier", "what", "bytes", "evidence", "formula"), rows)
    totals = ", ".join(f"{tier.value} {format_bytes(taken.total(tier))}" for tier in TIERS)
    output.line(f"total: {totals}")


def _show_degrees(made: Plan, output: Output) -> None:
    """Show the number of chunks in which rows travel to experts, forward and backward."""
    prediction = made.prediction
    if prediction is None or prediction.degrees is None:
        return
    degrees = prediction.degrees
    output.table(
        f"Chunks of a MoE layer's pass, at most {degrees.most} ({degrees.evidence.value})",
        ("pass", "best", "time", "in one chunk"),
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
                f"{one.phase.name.lower()}: {one.best.wanted} chunks would be best, of at most {degrees.most}"
            )
    taken = ", ".join(f"{count} {phase.name.lower()}" for phase, count in degrees.taken.items())
    why = "auto: the best number if it saves 2%" if degrees.auto else "parallel.pipeline_degree"
    line, saved = f"chunks of a step: {taken} ({why})", prediction.chunks_save_s
    if max(degrees.taken.values()) > 1:
        line += (
            f": the step takes {format_seconds(prediction.step_s)}, in one chunk "
            f"{format_seconds(prediction.one_chunk_s)}: chunks {'save' if saved >= 0 else 'cost'} "
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
        f"gathered table: each rank sends {format_bytes(cost.gathered_sent)} per step and needs "
        f"{format_bytes(cost.gathered_memory)} besides its slices; partitioned rows: it sends "
        f"{format_bytes(cost.embedding_sent)} for the embedding or {format_bytes(cost.head_sent)} for the head, and needs "
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
