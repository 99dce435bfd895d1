"""The memory that commands announce, beside the peak that the kernel counted.

    python experiments/memory.py [--width 256] [--layers 4] [--experts 16] [--steps 10] [--cases train generate-8]

Each case runs ``tierstore`` in a process of its own and reads both from its JSON; ``generate`` and the commands on a whole
store use the store that ``train`` made. Models have experts of twice the width, and budgets hold a quarter of them. Exit
status 1: a peak is more than 3% above what was announced, or less than 85% of it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from emulation import OUTPUT, TIMEOUT_S, finish, options, start

from tierstore.errors import DataError
from tierstore.units import format_bytes

#: What a peak may be of what was announced.
LEAST, MOST = 0.85, 1.03
#: Settings of training by case, beside those of the model.
TRAINED: dict[str, dict[str, object]] = {
    "train": {},
    "train-large-batch": {"data.batch_size": 32},
    "train-micro-batches": {"data.micro_batches": 4, "data.micro_order": "micro"},
    "train-layer-order": {"data.micro_batches": 4, "data.micro_order": "layer"},
    "train-checkpointed": {"data.batch_size": 32, "model.checkpoint_activations": "block"},
    "train-int8-moments": {"adamw.moments": "int8"},
    "train-clipped": {"clip_norm": 1},
    "train-dense": {"model.moe_every": 0},
}
#: Texts that are generated at once, by case.
GENERATED = {"generate": 1, "generate-8": 8}
#: Commands on a whole store by case, and their options; ``to``: where they write.
WHOLE: dict[str, tuple[str, ...]] = {
    "verify": (),
    "export": ("--to", "{to}"),
    "export-bf16": ("--to", "{to}", "--dtype", "bf16"),
    "reshard": ("--to", "{to}", "--ranks", "2"),
    "reshard-int8-moments": ("--to", "{to}", "--moments", "int8"),
}
PROMPT = "def f(x):\n    return " * 3


def tierstore(*arguments: str) -> dict[str, Any]:
    """The JSON that a command prints. Raises DataError with its last line if it fails."""
    environ = os.environ | {"TIERSTORE_IO_PROFILE": "none"}
    command = [sys.executable, "-c", "from tierstore.cli.main import main; main()", *arguments, "--json"]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise DataError(
            f"tierstore {arguments[0]}: {(done.stderr.splitlines() or [str(done.returncode)])[-1]}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(case: str, store: Path, settings: dict[str, object], budget: int) -> dict[str, Any]:
    """Runs ``case``: trains in ``store``, generates from it, or reads the whole of it."""
    if case in WHOLE:
        to = store.with_name(f"{case}.out")
        command = case.partition("-")[0]
        return tierstore(command, str(store), *(option.format(to=to) for option in WHOLE[case]))
    if case in GENERATED:
        prompts = ["--prompt", PROMPT] * GENERATED[case]
        return tierstore("generate", str(store), *prompts, "--max-tokens", "32", "--host-budget", str(budget))
    sets = {"host_budget": budget, **settings, **TRAINED[case]}
    return tierstore(
        "train",
        "--store",
        str(store),
        *(part for key, value in sets.items() for part in ("--set", f"{key}={value}")),
    )


def main() -> None:
    cases = (*TRAINED, *GENERATED, *WHOLE)
    asked = options(__doc__, width=256, layers=4, experts=16, steps=10, cases=cases)
    settings = {
        "steps": asked.steps, "sample_tokens": 0, "eval_every": 0, "commit_every": 0, "data.batch_size": 8,
        "model.d_model": asked.width, "model.d_ff": 2 * asked.width, "model.n_heads": 4, "model.seq_len": 128,
        "model.n_layers": asked.layers, "model.experts": asked.experts,
    }  # fmt: skip
    record = 3 * asked.width * 2 * asked.width * 12
    budget = max(asked.layers * asked.experts // 4, 4) * record
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        trained = Path(directory, "train")
        if set(asked.cases) & {*GENERATED, *WHOLE} and "train" not in asked.cases:
            run("train", trained, settings, budget)
        for case in asked.cases:
            store = Path(directory, case) if case in TRAINED else trained
            found = run(case, store, settings, budget)
            announced, peak = found["memory"]["announced_bytes"], found["peak_resident_bytes"]
            runs.append(
                {"case": case, "announced_bytes": announced, "peak_bytes": peak, "ratio": peak / announced}
            )
    OUTPUT.table(
        "",
        ("case", "announced", "peak", "ratio"),
        [
            (
                each["case"],
                format_bytes(each["announced_bytes"]),
                format_bytes(each["peak_bytes"]),
                f"{each['ratio']:.2f}",
            )
            for each in runs
        ],
    )
    median = statistics.median(each["ratio"] for each in runs)
    OUTPUT.line(f"median of the ratios: {median:.2f}")
    apart = [
        f"{each['case']}: the peak is {each['ratio']:.2f} of what was announced"
        for each in runs
        if not LEAST <= each["ratio"] <= MOST
    ]
    finish({"runs": runs, "median_ratio": median}, apart)


if __name__ == "__main__":
    start(main)
