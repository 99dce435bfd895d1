#!/usr/bin/env python3
"""Draws loss, hits and bytes over the steps of a run, from the lines that ``tierstore train --metrics`` wrote.

    tierstore train --metrics run.jsonl
    scripts/plot_run.py run.jsonl docs/run.svg

The same file gives the same drawing, byte for byte. Needs matplotlib (the extra ``report``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tierstore.lab.reports.pictures import picture

GIB = 1 << 30


def draw(lines: list[dict[str, float]], target: Path) -> None:
    """Three panels side by side, one point a step."""
    steps = [line["step"] for line in lines]

    def column(key: str, unit: float = 1) -> list[float]:
        return [line[key] / unit for line in lines]

    with picture(target, 3, (9.6, 2.7)) as (loss, hits, moved):
        loss.plot(steps, column("loss"), color="#4c72b0", label="training")
        validated = [(line["step"], line["val_loss"]) for line in lines if line["val_loss"] is not None]
        if validated:
            loss.plot(*zip(*validated, strict=True), "o", markersize=4, color="#dd8452", label="validation")
        loss.set_title("Loss, nats a byte")
        loss.legend()

        asked = [hit + miss for hit, miss in zip(column("hits"), column("misses"), strict=True)]
        ratios = [100 * hit / of for hit, of in zip(column("hits"), asked, strict=True)]
        hits.plot(steps, ratios, color="#55a868")
        hits.set_ylim(0, 100)
        hits.set_title("Hits of the host cache, %")

        moved.plot(steps, column("read_bytes", GIB), color="#8172b3", label="read")
        moved.plot(steps, column("written_bytes", GIB), color="#b3a8d6", label="written")
        moved.set_ylim(bottom=0)
        moved.set_title("Disk, GiB a step")
        moved.legend(loc="lower right")

        for axes in (loss, hits, moved):
            axes.set_xlabel("step")
            axes.grid(alpha=0.25, linewidth=0.6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics", type=Path, help="written by tierstore train --metrics")
    parser.add_argument("target", type=Path, help="the SVG to write")
    options = parser.parse_args()
    draw([json.loads(line) for line in options.metrics.read_text().splitlines()], options.target)


if __name__ == "__main__":
    main()
