"""The memory that processes announce, beside the peak that the kernel counted (VmHWM).

    python experiments/memory.py [--width 256] [--layers 4] [--experts 16] [--steps 10] [--runs train generate-8]
        [--cgroup] [--shares 0.6 0.8 1]

Each run is a process of its own, two with two ranks, and both figures are in its JSON. What a run reads is made before by
runs that are not measured: a store of the built-in model, its export, and imports of that. Models have experts of twice
the width, and budgets hold a quarter of them.

``--cgroup`` repeats each run in a memory cgroup of what it announced and 3% more, page cache included: it must end with
the same bits. ``--shares`` repeats each that has ``--memory`` with these shares of its own peak, in a cgroup of 3% more:
it must end with the same bits, or be refused before it makes anything. Exit status 1: a peak is more than 3% above what
was announced or less than 85% of it, or a repetition differs or is killed; 2: this machine lets no cgroup be made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from emulation import OUTPUT, TIMEOUT_S, finish, options, start, table

from tierstore.bench.probes import MemoryLimit
from tierstore.errors import DataError
from tierstore.machine import peak_resident_bytes
from tierstore.parallel.layout import local_environments
from tierstore.store.disk.home import IDENTITY, rank_directories
from tierstore.store.parameter_store import open_to_read

#: What a peak may be of what was announced.
LEAST, MOST = 0.85, 1.03
SHORT = "def f(x):\n    return "
LONG = SHORT * 9
#: Requests to a server at once.
CLIENTS = 8
TOKENS = 32
TIERSTORE = "from tierstore.cli.main import main; main()"
#: The functions of this module that are processes of their own.
OWN = "import memory, sys; getattr(memory, sys.argv[1])(*sys.argv[2:])"


@dataclass(frozen=True)
class Bench:
    """Where runs are, and the size of their models; its properties are what runs read, made when first asked for."""

    directory: Path
    width: int
    layers: int
    experts: int
    steps: int

    @property
    def budget(self) -> int:
        record = 3 * self.width * 2 * self.width * 12
        return max(self.layers * self.experts // 4, 4) * record

    def train(self, store: Path, *options: str, **settings: object) -> list[str]:
        """The arguments that train the built-in model in ``store``; ``settings`` have ``__`` for dots."""
        sizes = {
            "data.batch_size": 4, "model.d_model": self.width, "model.d_ff": 2 * self.width, "model.n_heads": 4,
            "model.seq_len": 256, "model.n_layers": self.layers, "model.experts": self.experts,
        }  # fmt: skip
        return self.tune(store, *options, **(sizes | settings))

    def tune(self, store: Path, *options: str, **settings: object) -> list[str]:
        """The arguments that train the model that ``store`` has."""
        usual = {"steps": self.steps, "sample_tokens": 0, "eval_every": 0, "commit_every": 0}
        sets = {key.replace("__", "."): value for key, value in (usual | settings).items()}
        pairs = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
        return ["train", "--store", str(store), *self.budgeted(), *pairs, *options]

    def budgeted(self) -> list[str]:
        return ["--host-budget", str(self.budget)]

    def generate(self, prompt: str, count: int) -> list[str]:
        prompts = ["--prompt", prompt] * count
        chosen = ["--max-tokens", str(TOKENS), "--temperature", "0"]
        return ["generate", str(self.trained), *prompts, *chosen, *self.budgeted()]

    def _made(self, name: str, make: Callable[[Path], list[str]]) -> Path:
        to = self.directory / name
        execute(make(to), self.directory)
        return to

    @cached_property
    def trained(self) -> Path:
        return self._made("trained", self.train)

    @cached_property
    def checkpoint(self) -> Path:
        return self._made("checkpoint", lambda to: ["export", str(self.trained), "--to", str(to)])

    @cached_property
    def full(self) -> Path:
        return self._made("full", lambda to: ["import", str(self.checkpoint), "--store", str(to)])

    @cached_property
    def frozen(self) -> Path:
        return self._made(
            "frozen", lambda to: ["import", str(self.checkpoint), "--store", str(to), "--frozen"]
        )

    @cached_property
    def text(self) -> Path:
        path = self.directory / "text.txt"
        path.write_text(Path(contextlib.__file__).read_text())
        return path


@dataclass(frozen=True)
class Run:
    """``command``: its arguments, for what it makes or changes at the path; a function of ``OWN`` instead of a command if
    ``own``.
    """

    command: Callable[[Bench, Path], list[str]]
    ranks: int = 1
    own: bool = False
    #: Whether it has --memory, in place of its host budget.
    within: bool = False


def _trained(ranks: int = 1, **settings: object) -> Run:
    return Run(lambda bench, to: bench.train(to, **settings), ranks, within=ranks == 1)


def _imported(*options: str) -> Run:
    return Run(
        lambda bench, to: [
            "import", str(bench.checkpoint), "--store", str(to), *bench.budgeted(), *options,
        ],
        within=True,
    )  # fmt: skip


def _generated(prompt: str, count: int) -> Run:
    return Run(lambda bench, to: bench.generate(prompt, count), within=True)


def _whole(command: str, *options: str) -> Run:
    return Run(lambda bench, to: [command, str(bench.trained), "--to", str(to), *options])


def _own(function: str) -> Run:
    return Run(
        lambda bench, to: [
            function, str(shutil.copytree(bench.full, to)), str(bench.budget), str(bench.steps),
        ],
        own=True,
    )  # fmt: skip


def _tuned(source: Callable[[Bench], Path], *options: str) -> Run:
    return Run(
        lambda bench, to: bench.tune(
            shutil.copytree(source(bench), to), *options,
            data__batch_size=4, data__paths=bench.text, finetune__seq_len=256,
        ),
        within=True,
    )  # fmt: skip


RUNS: dict[str, Run] = {
    "create": Run(lambda bench, to: bench.train(to, steps=1), within=True),
    "train": _trained(),
    "resume": Run(
        lambda bench, to: bench.train(shutil.copytree(bench.trained, to), "--resume", steps=2 * bench.steps),
        within=True,
    ),
    "train-large-batch": _trained(data__batch_size=16),
    "train-micro-batches": _trained(data__micro_batches=4, data__micro_order="micro"),
    "train-layer-order": _trained(data__micro_batches=4, data__micro_order="layer"),
    "train-checkpointed": _trained(data__batch_size=16, model__checkpoint_activations="block"),
    "train-int8-moments": _trained(adamw__moments="int8"),
    "train-clipped": _trained(clip_norm=1),
    "train-dense": _trained(model__moe_every=0),
    "train-two-ranks": _trained(2),
    "train-stages": _trained(2, parallel__stages=2, data__micro_batches=4),
    "import": _imported(),
    "import-frozen": _imported("--frozen"),
    "finetune": _tuned(lambda bench: bench.full),
    "lora": _tuned(lambda bench: bench.frozen, "--lora", "8"),
    "open_model": _own("own_loop"),
    "Trainer": _own("transformers_trainer"),
    "generate-short": _generated(SHORT, 1),
    "generate-long": _generated(LONG, 1),
    "generate-8-short": _generated(SHORT, 8),
    "generate-8-long": _generated(LONG, 8),
    "generate-imported": Run(
        lambda bench, to: ["generate", str(bench.frozen), *bench.generate(LONG, 8)[2:]], within=True
    ),
    "serve": Run(
        lambda bench, to: ["serve", str(bench.frozen), "--port", "0", *bench.budgeted(), "--context", "256"],
        within=True,
    ),
    "deploy": Run(lambda bench, to: ["deploy", str(bench.trained), "--to", str(to), *bench.budgeted()]),
    "deploy-compressed": Run(
        lambda bench, to: [
            *("deploy", str(bench.trained), "--to", str(to), *bench.budgeted(), "--text", str(bench.text)),
            *("--experts", str(bench.experts // 2), "--steps", "2", "--minutes", "1"),
        ]
    ),
    "verify": Run(lambda bench, to: ["verify", str(bench.trained)]),
    "export": _whole("export"),
    "export-bf16": _whole("export", "--dtype", "bf16"),
    "reshard": _whole("reshard", "--ranks", "2"),
    "reshard-int8-moments": _whole("reshard", "--moments", "int8"),
}


# Runs of a caller's own loop ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(store: str, budget: str) -> Iterator[Any]:
    """The model of ``store``; prints at the end what was announced, and the peak."""
    from tierstore.hf import open_model

    with open_model(store, host_budget=int(budget)) as tiered:
        yield tiered
        account = tiered.account(4, 256)
    print(json.dumps({"memory": account.as_json(), "peak_resident_bytes": peak_resident_bytes()}))


def own_loop(store: str, budget: str, steps: str) -> None:
    import torch

    with _opened(store, budget) as tiered:
        tiered.model.train()
        for step in range(int(steps)):
            tokens = torch.arange(step, step + 4 * 256).view(4, 256) % tiered.model.config.vocab_size
            with tiered.step(lr=1e-3) as taken:
                taken.backward(tiered.model(input_ids=tokens, labels=tokens).loss)
        tiered.commit()


def transformers_trainer(store: str, budget: str, steps: str) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    from tierstore.hf import TieredCallback

    with _opened(store, budget) as tiered, tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=int(steps),
            per_device_train_batch_size=4,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        optimizer = tiered.optimizer(1e-3, max_grad_norm=arguments.max_grad_norm)
        rows = [
            torch.arange(row, row + 256) % tiered.model.config.vocab_size for row in range(4 * int(steps))
        ]
        Trainer(
            model=tiered.model,
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            optimizers=(optimizer, None),
            callbacks=[TieredCallback(tiered, optimizer)],
        ).train()


# Processes ---------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """A process, which waits until it is in its cgroup; its errors are in a file."""

    command: Sequence[str]
    environ: dict[str, str]
    errors: Path
    limit: MemoryLimit | None = None
    child: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        with self.errors.open("w") as errors:
            self.child = subprocess.Popen(
                ["sh", "-c", 'read go && exec "$@"', "sh", *self.command],
                env=self.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        if self.limit is not None:
            self.limit.add(self.child.pid)
        assert self.child.stdin is not None
        self.child.stdin.write("go\n")
        self.child.stdin.flush()

    def finish(self) -> dict[str, Any]:
        """The JSON that ends its output (nothing for a rank without). Raises DataError with its last line of errors."""
        out, _ = self.child.communicate()
        if self.child.returncode:
            last = (self.errors.read_text().splitlines() or [""])[-1]
            raise DataError(f"status {self.child.returncode}: {last}")
        found: dict[str, Any] = json.loads(out.splitlines()[-1]) if out.strip() else {}
        return found

    def url(self) -> str:
        """Where a server listens, once it does."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until and self.child.poll() is None:
            if found := re.search(r"serving .* at (http\S+)", self.errors.read_text()):
                return found[1]
            time.sleep(0.05)
        return ""


def execute(
    arguments: list[str], directory: Path, *, ranks: int = 1, own: bool = False, limit_bytes: int = 0
) -> dict[str, Any]:
    """The JSON of the first rank of a command (of a function of ``OWN``), each rank in a cgroup of ``limit_bytes`` if these
    are not 0. A server gets ``CLIENTS`` requests at once. Raises DataError if a rank fails.
    """
    command = [sys.executable, "-c", OWN if own else TIERSTORE, *arguments, *([] if own else ["--json"])]
    environ = os.environ | {"TIERSTORE_IO_PROFILE": "none", "PYTHONPATH": os.pathsep.join(sys.path)}
    placed = local_environments(ranks) if ranks > 1 else [{}]
    with contextlib.ExitStack() as stack:
        limits = [
            stack.enter_context(contextlib.closing(MemoryLimit(limit_bytes, name=str(rank))))
            if limit_bytes
            else None
            for rank in range(ranks)
        ]
        processes = [
            Process(command, environ | place, directory / f"errors-{rank}.txt", limit)
            for rank, (place, limit) in enumerate(zip(placed, limits, strict=True))
        ]
        for process in processes:
            stack.callback(process.child.wait)
            stack.callback(process.child.kill)
        answers = {}
        if arguments[0] == "serve" and (url := processes[0].url()):
            with ThreadPoolExecutor(CLIENTS) as clients:
                answers = {"answers": list(clients.map(_ask, [url] * CLIENTS, range(CLIENTS)))}
            processes[0].child.send_signal(signal.SIGINT)
        first, *_ = [process.finish() for process in processes]
        kills = sum(limit.use()["kills_count"] for limit in limits if limit is not None)
        if kills:
            raise DataError(f"{kills} processes killed")
    return first | answers


def _ask(url: str, client: int) -> str:
    prompt = (LONG if client % 2 else SHORT) + str(client)
    body = {"model": "frozen", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


# Runs and their repetitions ----------------------------------------------------------------------------------


def bits(found: dict[str, Any], made: Path) -> object:
    """What must be the same in a repetition: texts, the records of stores, the weights of a checkpoint, or what was read."""
    if "answers" in found:
        return found["answers"]
    if "texts" in found:
        return [text["tokens"] for text in found["texts"]]
    if (stores := rank_directories(made)) or (made / IDENTITY).exists():
        sums = []
        for store in stores or [made]:
            with open_to_read(store) as opened:
                sums.append(opened.records_crc32c())
        return sums
    if made.exists():
        return [hashlib.sha256(path.read_bytes()).digest() for path in sorted(made.glob("*.safetensors"))]
    return [found[name] for name in ("records", "sections", "read_bytes", "failures")]


def again(run: Run, bench: Bench, name: str, expected: object, limit: int, memory: int = 0) -> str:
    """Repeats ``run`` in a cgroup of ``limit`` bytes, with ``memory`` if that is not 0; says how it ended."""
    made = bench.directory / f"{name}.again"
    arguments = run.command(bench, made)
    if memory:
        at = arguments.index("--host-budget")
        arguments[at : at + 2] = ["--memory", str(memory)]
    before = made.exists()
    try:
        found = execute(arguments, bench.directory, ranks=run.ranks, own=run.own, limit_bytes=limit)
        ended = "same bits" if bits(found, made) == expected else "other bits"
    except DataError as error:
        refused = memory and "status 2:" in str(error) and "memory: expected at least" in str(error)
        ended = "refused" if refused and made.exists() == before else str(error)
    shutil.rmtree(made, ignore_errors=True)
    return ended


def main() -> None:
    asked = options(
        __doc__, width=256, layers=4, experts=16, steps=10, runs=tuple(RUNS), cgroup=False, shares=(0.0,)
    )
    shares = [share for share in asked.shares if share]
    if asked.cgroup or shares:
        MemoryLimit(1 << 30).close()  # raises if this machine lets none be made
    rows: list[dict[str, Any]] = []
    kinds: dict[str, None] = {}  # of repetitions, in order
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), asked.width, asked.layers, asked.experts, asked.steps)
        for name in asked.runs:
            run, made = RUNS[name], bench.directory / f"{name}.made"
            try:
                found = execute(run.command(bench, made), bench.directory, ranks=run.ranks, own=run.own)
            except DataError as error:
                raise DataError(f"{name}: {error}") from None
            expected = bits(found, made)
            shutil.rmtree(made, ignore_errors=True)
            announced, peak = found["memory"]["announced_bytes"], found["peak_resident_bytes"]
            row = {"run": name, "announced_bytes": announced, "peak_bytes": peak, "ratio": peak / announced}
            repeated: dict[str, str] = {}
            if asked.cgroup:
                repeated["cgroup"] = again(run, bench, name, expected, int(announced * MOST))
            for share in shares if run.within else ():
                memory = int(share * peak)
                repeated[f"memory {share:.0%}"] = again(
                    run, bench, name, expected, int(memory * MOST), memory
                )
            rows.append(row | repeated)
            kinds |= dict.fromkeys(repeated)
            outcomes = "".join(f", {key}: {outcome}" for key, outcome in repeated.items())
            said = f"{name}: {announced >> 20} MiB announced, {peak / announced:.2f} at the peak{outcomes}"
            print(said, file=sys.stderr, flush=True)
    table("", rows, "run", "announced_bytes", "peak_bytes", "ratio", *kinds)
    median = statistics.median(row["ratio"] for row in rows)
    OUTPUT.line(f"median of the ratios: {median:.2f}")
    apart = [
        f"{row['run']}: the peak is {row['ratio']:.2f} of what was announced"
        for row in rows
        if not LEAST <= row["ratio"] <= MOST
    ]
    apart += [
        f"{row['run']}: {key}: {row[key]}"
        for row in rows
        for key in kinds
        if row.get(key, "-") not in ("-", "same bits", "refused" if key != "cgroup" else "")
    ]
    finish({"runs": rows, "median_ratio": median}, apart)


if __name__ == "__main__":
    start(main)
