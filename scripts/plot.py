#!/usr/bin/env python3
"""Draws a run, a run with kills, a fine-tuning run beside plain transformers, or a race of training, as an SVG.

    tierstore train --metrics run.jsonl && scripts/plot.py run run.jsonl docs/run.svg
    python experiments/killed.py --work DIRECTORY && scripts/plot.py killed DIRECTORY docs/five-billion.svg
    scripts/plot.py finetune reference.json run.jsonl docs/finetune.svg
    python rivals/race.py train CONFIG --save race.json && scripts/plot.py race race.json docs/rivals.svg

``run``: loss, hits and bytes over the steps. ``killed``: loss, tokens a second and the parts of a step's time over the steps
of the whole run, and memory over the time of the killed one. ``finetune``: both losses and how far apart they are; the
reference is a JSON object with ``losses``, one a step, and ``held_out``, pairs of steps taken and loss
(``scripts/finetune_reference.py``). ``race``: tokens a second with the range over rounds, memory, and bytes a step, of each
rival that ran. The same files give the same drawing, byte for byte. Needs matplotlib (the extra ``report``).
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from tierstore.outputs import OutputKind, write_output

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "tierstore",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "font.size": 9,
    "legend.frameon": False,
}
GIB = 1 << 30
BLUE, ORANGE, GREEN, RED, VIOLET, PALE_VIOLET = (
    *("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#b3a8d6"),
)
LEAST = 1e-8  # nats: what a difference of nothing is drawn as


@contextmanager
def picture(target: Path, panels: int, size: tuple[float, float], **layout: Any) -> Iterator[Any]:
    """Gives the axes of ``panels`` panels to draw on in the block, then writes the SVG. ``size``: inches."""
    with rc_context(SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        yield figure.subplots(1, panels, **layout)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    # A path a line, not a point a line.
    write_output(target, OutputKind.PICTURE, drawn.getvalue().replace(" \n", " "))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def validated(lines: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Steps and validation losses."""
    return [(line["step"], line["val_loss"]) for line in lines if line.get("val_loss") is not None]


def over_steps(*panels: Any) -> None:
    for axes in panels:
        axes.set_xlabel("step")
        axes.grid(alpha=0.25, linewidth=0.6)


def draw_run(metrics: Path, target: Path) -> None:
    """Three panels side by side, one point a step."""
    lines = read_lines(metrics)
    steps = [line["step"] for line in lines]

    def column(key: str, unit: float = 1) -> list[float]:
        return [line[key] / unit for line in lines]

    with picture(target, 3, (9.6, 2.7)) as (loss, hits, moved):
        loss.plot(steps, column("loss"), color=BLUE, label="training")
        if points := validated(lines):
            loss.plot(*zip(*points, strict=True), "o", markersize=4, color=ORANGE, label="validation")
        loss.set_title("Loss, nats a byte")
        loss.legend()

        asked = [hit + miss for hit, miss in zip(column("hits"), column("misses"), strict=True)]
        hits.plot(steps, [100 * hit / of for hit, of in zip(column("hits"), asked, strict=True)], color=GREEN)
        hits.set_ylim(0, 100)
        hits.set_title("Hits of the host cache, %")

        moved.plot(steps, column("read_bytes", GIB), color=VIOLET, label="read")
        moved.plot(steps, column("written_bytes", GIB), color=PALE_VIOLET, label="written")
        moved.set_ylim(bottom=0)
        moved.set_title("Disk, GiB a step")
        moved.legend(loc="lower right")
        over_steps(loss, hits, moved)


def draw_killed(directory: Path, target: Path) -> None:
    """Four panels side by side."""
    lines = read_lines(directory / "whole.jsonl")
    whole, killed = (json.loads((directory / f"{name}.json").read_text()) for name in ("whole", "killed"))
    steps = [line["step"] for line in lines]
    with picture(target, 4, (12.8, 2.7)) as (loss, speed, parts, memory):
        loss.plot(steps, [line["loss"] for line in lines], color=BLUE, label="training")
        loss.plot(*zip(*validated(lines), strict=True), "o", markersize=4, color=ORANGE, label="validation")
        loss.set_title("Loss, nats a byte")
        loss.legend()

        speed.plot(steps, [whole["step_tokens"] / line["step_s"] for line in lines], color=GREEN)
        speed.set_ylim(bottom=0)
        speed.set_title("Tokens a second")

        times = [line["step_time"] for line in lines]
        stalls = [{stall["cause"]: stall["stall_s"] for stall in time["stalls"]} for time in times]
        disk = [
            sum(each.get(cause, 0) for cause in ("demand read", "late prefetch", "spill")) for each in stalls
        ]
        known = {
            "computing": [time["computing_s"] for time in times],
            "cores taken": [time["run_queue_s"] + time["threads_s"] for time in times],
            "waiting for AdamW": [each.get("optimizer", 0) for each in stalls],
            "waiting for the disk": disk,
        }
        colours = (BLUE, PALE_VIOLET, ORANGE, RED)
        parts.stackplot(steps, *known.values(), labels=known.keys(), colors=colours)
        parts.set_ylim(0, 1.5 * max(line["step_s"] for line in lines))  # the legend is above
        parts.set_title("A step's time, s")
        parts.legend(loc="upper right", fontsize=8, ncols=2)
        over_steps(loss, speed, parts)

        samples = killed["resident"][:: 1 + len(killed["resident"]) // 200]
        memory.plot([at / 60 for at, _ in samples], [held / GIB for _, held in samples], color=VIOLET)
        announced = killed["summary"]["memory"]["announced_bytes"] / GIB
        memory.axhline(announced, color="#444444", linewidth=0.8, linestyle="--", label="announced")
        for number, at in enumerate(killed["kills_s"]):
            memory.axvline(at / 60, color=RED, linewidth=0.8, label="" if number else "SIGKILL")
        memory.set_ylim(bottom=0)
        memory.set_title("Memory with kills, GiB")
        memory.set_xlabel("minutes")
        for axes in (loss, speed, parts, memory):
            axes.locator_params(nbins=3)
        memory.legend(loc="lower right", fontsize=8)


def draw_finetune(reference: Path, metrics: Path, target: Path) -> None:
    """Two panels: the losses of both, and the absolute difference on a logarithmic scale."""
    known, lines = json.loads(reference.read_text()), read_lines(metrics)
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    apart = [max(abs(a - b), LEAST) for a, b in zip(losses, known["losses"], strict=True)]
    with picture(target, 2, (9.6, 2.9), width_ratios=(2, 1)) as (curve, difference):
        curve.plot(steps, known["losses"], color=RED, linewidth=3, alpha=0.35, label="transformers")
        curve.plot(steps, losses, color=BLUE, linewidth=1.2, label="tierstore")
        for points, marker, colour, fill, label in (
            (known["held_out"], "s", RED, "none", "transformers, held out"),
            (validated(lines), "o", BLUE, BLUE, "tierstore, held out"),
        ):
            if points:
                x, y = zip(*points, strict=True)
                curve.plot(x, y, marker, color=colour, markerfacecolor=fill, label=label)
        curve.set_title("Loss, nats a token")
        curve.legend(ncols=2)

        difference.semilogy(steps, apart, ".", color=GREEN)
        difference.set_title("Difference, nats")
        over_steps(curve, difference)


def draw_race(saved: Path, target: Path) -> None:
    """Three panels, a row a rival."""
    rivals = json.loads(saved.read_text())["figures"]["rivals"]
    ran = [one for one in rivals if one["outcome"] == "ran"][::-1]
    rows, times = range(len(ran)), [one["times"] for one in ran]
    colours = [BLUE if one["rival"].startswith("tierstore") else "#b0b0b0" for one in ran]
    with picture(target, 3, (9.6, 0.9 + 0.4 * len(ran)), sharey=True) as (speed, memory, moved):
        rates = [one["tokens_per_s"] for one in times]
        least = [rate - one["tokens_low_per_s"] for rate, one in zip(rates, times, strict=True)]
        most = [one["tokens_high_per_s"] - rate for rate, one in zip(rates, times, strict=True)]
        speed.barh(rows, rates, color=colours, xerr=(least, most), ecolor="#444444", height=0.6)
        speed.set_yticks(rows, [one["title"] for one in ran])
        speed.set_title("Tokens a second")

        memory.barh(rows, [one["peak_resident_bytes"] / GIB for one in times], color=colours, height=0.6)
        memory.set_title("Peak resident memory, GiB")

        read, written = ([one[f"step_{way}_bytes"] / GIB for one in times] for way in ("read", "written"))
        moved.barh(rows, read, color=VIOLET, height=0.6, label="read")
        moved.barh(rows, written, left=read, color=PALE_VIOLET, height=0.6, label="written")
        moved.set_title("Disk, GiB a step")
        moved.legend(loc="lower right")
        for axes in (speed, memory, moved):
            axes.grid(axis="x", alpha=0.25, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.tick_params(axis="y", length=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "killed", "finetune", "race"))
    parser.add_argument("files", type=Path, nargs="+", help="what is drawn, and the SVG to write")
    asked = parser.parse_args()
    draw: Any = {"run": draw_run, "killed": draw_killed, "finetune": draw_finetune, "race": draw_race}[
        asked.what
    ]
    if len(asked.files) != (3 if asked.what == "finetune" else 2):
        parser.error(f"{asked.what}: expected the files above")
    draw(*asked.files)


if __name__ == "__main__":
    main()
