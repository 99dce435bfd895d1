"""The default recipe at several widths and depths: losses fall from the start, and no step is wild.

    python experiments/recipe.py [--shapes 64x2 256x2 512x16 1024x4 2048x2] [--seeds 0 1 2] [--steps 30] [--svg curves.svg]

Trains the built-in model of each shape (width x blocks, four experts of twice the width, two a token) with the defaults of
initial weights, learning rate and warm-up, on the text of the main job. ``--lr`` gives all shapes one learning rate instead.
Exit status 1: a held-out loss is above the one before it, or the gradient's norm in a step is over ten times its median.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from emulation import OUTPUT, finish, options, start
from memory import execute

from tierstore.errors import DataError

#: Validations in a run; the most that a step's norm may be, in times of the median.
VALIDATIONS, WILDEST = 5, 10


def curve(directory: Path, shape: str, seed: int, settings: dict[str, object]) -> dict[str, Any]:
    """Trains the model of ``shape``; losses (nats) and norms of all steps, and held-out losses."""
    width, _, blocks = shape.partition("x")
    if not (width.isdigit() and blocks.isdigit()):
        raise DataError(f"--shapes: expected width x blocks such as 256x2, got {shape}")
    metrics = directory / f"{shape}.{seed}.jsonl"
    model = {
        "d_model": int(width), "n_layers": int(blocks), "n_heads": max(1, int(width) // 64), "d_ff": 2 * int(width),
        "experts": 4, "seed": seed,
    }  # fmt: skip
    sets = {**settings, **{f"model.{name}": value for name, value in model.items()}}
    store = directory / f"{shape}.{seed}"
    flags = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    run = execute(["train", "--store", str(store), "--metrics", str(metrics), *flags], directory)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    held_out = [step["val_loss"] for step in steps if step["val_loss"] is not None] + [run["val_loss"]]
    norms = [step["grad_norm"] for step in steps]
    return {
        "shape": shape,
        "seed": seed,
        "lr": max(step["lr"] for step in steps),
        "losses": [step["loss"] for step in steps],
        "held_out_losses": held_out,
        "falls": all(later <= earlier for earlier, later in itertools.pairwise(held_out)),
        "worst_norm_ratio": max(norms) / statistics.median(norms),
    }


def draw(found: list[dict[str, Any]]) -> str:
    """The losses of each shape by step, as the mean over seeds."""
    from matplotlib import rc_context

    from tierstore.reports.drawing import SETTINGS, line, new_figure, set_legend, style, svg_of

    with rc_context(SETTINGS):
        figure, axes = new_figure()
        for number, shape in enumerate(dict.fromkeys(each["shape"] for each in found)):
            runs = [each["losses"] for each in found if each["shape"] == shape]
            means = [statistics.mean(losses) for losses in zip(*runs, strict=True)]
            line(axes, range(1, len(means) + 1), means, shape, style(number))
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats a byte)")
        set_legend(figure, axes)
        return svg_of(figure)


def main() -> None:
    shapes = ("64x2", "128x4", "256x2", "256x8", "512x4", "512x16", "1024x4", "2048x2")
    asked = options(
        __doc__, shapes=shapes, seeds=(0, 1, 2), steps=30, batch=8, seq_len=128, lr=0.0, host_budget=2 << 30, svg=None
    )  # fmt: skip
    settings = {
        "steps": asked.steps, "sample_tokens": 0, "commit_every": 0, "host_budget": asked.host_budget,
        "eval_every": max(1, asked.steps // VALIDATIONS), "data.batch_size": asked.batch,
        "model.seq_len": asked.seq_len, "clip_norm": 1e9,  # never reached: norms are computed for it
    }  # fmt: skip
    if asked.lr:
        settings["schedule.lr"] = asked.lr
    found = []
    for shape in asked.shapes:
        for seed in asked.seeds:
            with tempfile.TemporaryDirectory() as directory:
                found.append(curve(Path(directory), shape, seed, settings))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    rows = [
        (
            each["shape"],
            str(each["seed"]),
            f"{each['lr']:g}",
            f"{each['losses'][0]:.2f}",
            f"{max(each['losses']):.2f}",
            " ".join(f"{loss:.2f}" for loss in each["held_out_losses"]),
            f"{each['worst_norm_ratio']:.1f}",
        )
        for each in found
    ]
    OUTPUT.table("", ("shape", "seed", "lr", "first", "worst", "held out", "norm / median"), rows)
    if asked.svg is not None:
        Path(asked.svg).write_text(draw(found))
    failures = [
        f"{each['shape']}, seed {each['seed']}: a held-out loss rose" for each in found if not each["falls"]
    ]
    failures += [
        f"{each['shape']}, seed {each['seed']}: a step's norm is {each['worst_norm_ratio']:.1f} x the median"
        for each in found
        if each["worst_norm_ratio"] > WILDEST
    ]
    finish({"runs": found}, failures)


if __name__ == "__main__":
    start(main)
