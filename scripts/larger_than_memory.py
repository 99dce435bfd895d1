#!/usr/bin/env python3
"""Imports, trains and exports a checkpoint in memory cgroups far smaller than its records, and says what each step took.

    scripts/make_moe.py runs/moe --tokenizer-text train.txt
    scripts/larger_than_memory.py runs/moe train.jsonl --work runs/larger --json larger.json

Each import is run in turns with a probe of the disk: the same bytes read and written as the import caused, side by side
in its proportions, by the engine alone. ``ratio`` is the import's speed over the mean of the probes before and after it,
by the time that the import itself reports; ``whole_ratio`` counts the start of Python and of its libraries too.
The kernel kills what does not fit into a group, whose memory includes the page cache of what its processes were the
first to touch. Needs the right to make memory cgroups, and disk for the store (``--only`` runs some of the parts).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierstore.bench.probes import Bytes, DiskProbe, Durable, MemoryLimit, drop_pages, page_cache_bytes
from tierstore.store.config import IoConfig
from tierstore.units import format_bytes, parse_size

SECTOR = 512  # of the kernel's counts
PROBE_FILE = 4 << 30
TRANSFERS = (786_432, 2_359_296)  # bytes: a projection of an expert as it is read, an expert as it is written
TIERSTORE = (sys.executable, "-P", "-c", "from tierstore.cli.main import main; main()")


def confined(name: str, command: Sequence[str], limit_bytes: int, files: Path) -> dict[str, Any]:
    """Runs ``command`` in a group of its own, where the shell starts it once it is in the group: what it took, and what
    of its ``files`` the page cache held afterwards.
    """
    with contextlib.closing(MemoryLimit(limit_bytes)) as limit:
        begun = time.perf_counter()
        process = subprocess.Popen(
            ["sh", "-c", 'read go && exec "$@"', "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # with --json: one object, which fits into a pipe
            text=True,
        )
        limit.add(process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begun
        answer = process.stdout.read()
        process.stdout.close()
        used = limit.use()
    return {
        "name": name,
        "limit_bytes": limit_bytes,
        "status": process.returncode,
        "seconds": seconds,
        "peak_bytes": used["peak_bytes"],
        "kills": used["kills_count"],
        "read_bytes": usage.ru_inblock * SECTOR,
        "written_bytes": usage.ru_oublock * SECTOR,
        "cached_file_bytes": page_cache_bytes(path for path in files.rglob("*") if path.is_file()),
        "disk_bytes_per_s": None,  # the probe's, of the same bytes
        "reported_s": json.loads(answer).get("moving_s")
        if answer
        else None,  # the time that the command says it took
        "ratio": None,  # the speed by that time over the probe's
        "whole_ratio": None,  # the speed by ``seconds`` over the probe's
    }


def forget(directory: Path) -> None:
    """Drops the pages of all files of ``directory`` from the page cache: what follows reads from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            drop_pages(path)


def probed(work: Path, mix: Bytes) -> float:
    """Bytes per second that the engine alone moves of ``mix``, durable at the end."""
    with contextlib.closing(DiskProbe(work, PROBE_FILE, TRANSFERS, IoConfig())) as probe:
        return probe.bytes_per_s(mix, durable=Durable.YES)


def imports(args: argparse.Namespace, name: str, options: Sequence[str], store: Path) -> list[dict[str, Any]]:
    """Imports in turns with probes. The store of the last one stays."""
    results: list[dict[str, Any]] = []
    speeds: list[float] = []
    for turn in range(args.turns):
        shutil.rmtree(store, ignore_errors=True)
        forget(args.checkpoint)
        command = [*TIERSTORE, "import", str(args.checkpoint), "--store", str(store), "--json", *options]
        result = confined(name, command, args.import_limit, args.checkpoint)
        results.append(result)
        if result["status"]:
            break
        mix = Bytes(result["read_bytes"], result["written_bytes"])
        if turn == 0:  # the probe needs to know what to move
            speeds.append(probed(args.work, mix))
        speeds.append(probed(args.work, mix))
        around = statistics.mean(speeds[-2:])
        ratio, whole = (mix.total / taken / around for taken in (result["reported_s"], result["seconds"]))
        result |= {"disk_bytes_per_s": around, "ratio": ratio, "whole_ratio": whole}
    return results


def show(result: dict[str, Any]) -> None:
    """One line for people."""
    speed = (result["read_bytes"] + result["written_bytes"]) / result["seconds"]
    size = {
        key: "?" if value is None else format_bytes(value)
        for key, value in result.items()
        if key.endswith("bytes")
    }
    print(
        f"{result['name']:<14} status {result['status']}, {result['seconds']:7.1f} s, peak {size['peak_bytes']} of "
        f"{size['limit_bytes']}, {size['cached_file_bytes']} of its files in the page cache; "
        f"read {size['read_bytes']}, wrote {size['written_bytes']}, {format_bytes(speed)}/s"
        + ("" if result["ratio"] is None else f", {result['ratio']:.2f} of the disk's ({result['whole_ratio']:.2f})"),
        flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="text to train on, as `tierstore train --data` takes it")
    parser.add_argument("--work", type=Path, required=True, help="directory for stores and exports")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument(
        "--only", default="import,frozen,full,lora,export", help="parts to run, in this order"
    )
    parser.add_argument("--turns", type=int, default=3, help="imports, each between two probes")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16, help="of LoRA")
    for name, size in (("import", "1.5GiB"), ("full", "3GiB"), ("lora", "2GiB"), ("export", "1.5GiB")):
        parser.add_argument(f"--{name}-limit", type=parse_size, default=parse_size(size))
    parser.add_argument("--full-budget", default="512MiB", help="host budget of full steps")
    parser.add_argument("--lora-budget", default="384MiB", help="host budget of LoRA steps")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    full, frozen, exported = (args.work / name for name in ("full", "frozen", "exported"))
    steps = ["--data", str(args.data), "--steps", str(args.steps), "--set", "sample_tokens=0"]
    steps += ["--set", "finetune.seq_len=256", "--set", "finetune.checkpoint_activations=block"]
    results: list[dict[str, Any]] = []

    def run(part: str, command: Sequence[str], limit: int, files: Path) -> None:
        forget(files)
        results.append(confined(part, [*TIERSTORE, *command, "--json"], limit, files))
        show(results[-1])

    for part in args.only.split(","):
        match part:
            case "import" | "frozen":
                store, options = (full, []) if part == "import" else (frozen, ["--frozen"])
                results += imports(args, part, options, store)
                for result in results[-args.turns :]:
                    show(result)
            case "full":
                command = ["train", "--store", str(full), *steps, "--host-budget", args.full_budget]
                command += ["--set", "data.batch_size=4"]
                run(part, command, args.full_limit, full)
            case "lora":
                command = ["train", "--store", str(frozen), "--lora", str(args.rank), *steps]
                command += ["--set", "data.batch_size=2", "--host-budget", args.lora_budget]
                run(part, command, args.lora_limit, frozen)
            case "export":
                shutil.rmtree(exported, ignore_errors=True)
                run(part, ["export", str(full), "--to", str(exported)], args.export_limit, args.work)
            case _:
                parser.error(f"--only: no part {part!r}")
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(any(result["status"] or result["kills"] for result in results))


if __name__ == "__main__":
    main()
