#!/usr/bin/env python3
"""Draws a race: tokens a second with the range over rounds, peak resident memory, and bytes a step, of each that ran.

    python rivals/race.py train examples/configs/deepspeed-139m.toml --save rivals.json
    python rivals/plot.py rivals.json docs/rivals.svg

The same file gives the same drawing, byte for byte. Needs matplotlib (the extra ``report``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tierstore.lab.reports.pictures import picture

GIB = 1 << 30
OURS, OTHERS = "#4c72b0", "#b0b0b0"


def draw(figures: dict[str, Any], target: Path) -> None:
    """Three panels, a row a rival."""
    ran = [one for one in figures["rivals"] if one["outcome"] == "ran"][::-1]
    rows = range(len(ran))
    times = [one["times"] for one in ran]
    colours = [OURS if one["rival"].startswith("tierstore") else OTHERS for one in ran]
    with picture(target, 3, (9.6, 0.9 + 0.4 * len(ran)), sharey=True) as (speed, memory, moved):
        rates = [one["tokens_per_s"] for one in times]
        least = [rate - one["tokens_low_per_s"] for rate, one in zip(rates, times, strict=True)]
        most = [one["tokens_high_per_s"] - rate for rate, one in zip(rates, times, strict=True)]
        speed.barh(rows, rates, color=colours, xerr=(least, most), ecolor="#444444", height=0.6)
        speed.set_yticks(rows, [one["title"] for one in ran])
        speed.set_title("Tokens a second")

        memory.barh(rows, [one["peak_resident_bytes"] / GIB for one in times], color=colours, height=0.6)
        memory.set_title("Peak resident memory, GiB")

        read = [one["step_read_bytes"] / GIB for one in times]
        written = [one["step_written_bytes"] / GIB for one in times]
        moved.barh(rows, read, color="#8172b3", height=0.6, label="read")
        moved.barh(rows, written, left=read, color="#b3a8d6", height=0.6, label="written")
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
    parser.add_argument("saved", type=Path, help="written by race.py train --save")
    parser.add_argument("target", type=Path, help="the SVG to write")
    options = parser.parse_args()
    draw(json.loads(options.saved.read_text())["figures"], options.target)


if __name__ == "__main__":
    main()
