#!/usr/bin/env python3
"""Draws a fine-tuning run beside plain transformers on the same batches: both losses, and how far they are apart.

    tierstore train --store runs/q --data train.jsonl --metrics run.jsonl
    scripts/plot_finetune.py reference.json run.jsonl docs/finetune.svg

The reference is a JSON object with ``losses``, one a step, and ``held_out``, pairs of steps taken and loss. The same
files give the same drawing, byte for byte. Needs matplotlib (the extra ``report``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tierstore.lab.reports.pictures import picture

LEAST = 1e-8  # nats: what a difference of nothing is drawn as


def draw(reference: dict[str, Any], lines: list[dict[str, Any]], target: Path) -> None:
    """Two panels: the losses of both, and the absolute difference on a logarithmic scale."""
    steps = [line["step"] for line in lines]
    losses = [line["loss"] for line in lines]
    apart = [max(abs(a - b), LEAST) for a, b in zip(losses, reference["losses"], strict=True)]
    validated = [(line["step"], line["val_loss"]) for line in lines if line.get("val_loss") is not None]
    with picture(target, 2, (9.6, 2.9), width_ratios=(2, 1)) as (curve, difference):
        curve.plot(steps, reference["losses"], color="#c44e52", linewidth=3, alpha=0.35, label="transformers")
        curve.plot(steps, losses, color="#4c72b0", linewidth=1.2, label="tierstore")
        for points, marker, colour, label in (
            (reference["held_out"], "s", "#c44e52", "transformers, held out"),
            (validated, "o", "#4c72b0", "tierstore, held out"),
        ):
            if points:
                fill = "none" if marker == "s" else colour
                curve.plot(
                    *zip(*points, strict=True), marker, color=colour, markerfacecolor=fill, label=label
                )
        curve.set_title("Loss, nats a token")
        curve.legend(ncols=2)

        difference.semilogy(steps, apart, ".", color="#55a868")
        difference.set_title("Difference, nats")
        for axes in (curve, difference):
            axes.set_xlabel("step")
            axes.grid(alpha=0.25, linewidth=0.6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reference", type=Path, help="losses of plain transformers")
    parser.add_argument("metrics", type=Path, help="written by tierstore train --metrics")
    parser.add_argument("target", type=Path, help="the SVG to write")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.metrics.read_text().splitlines()]
    draw(json.loads(options.reference.read_text()), lines, options.target)


if __name__ == "__main__":
    main()
