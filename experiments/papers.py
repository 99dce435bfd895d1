"""Published figures of SE-MoE, PipeMoE and Pipeline MoE beside what `tierstore plan` and its formulas give.

    python experiments/papers.py [--tables SE-MoE-1 SE-MoE-2 ...]

Nothing is measured here: GPUs are taken by their data sheets (``tierstore.machine_profile``), 40% of their operations and
80% of their links, with a node's 100 Gb/s shared by its GPUs. What the papers leave out is assumed:

* SE-MoE, Table 1: sequences of 2,048 tokens.
* SE-MoE, Table 2: 24 layers of width 4,096, each other one with 64 or 128 experts. Their parameters are the printed ones
  to the last digit.
* Pipeline MoE, Table 2: global batches of GPT-3, 256 sequences for the small setting and 1,024 for the large one, in
  micro-batches of at most 16 (small) and 32 (large); untied tables, since pipeline stages exclude tied ones here.

A figure is within 2 x of the published one, or ``Row.term`` names the term that differs, and ``Row.mended`` is the figure
with that term as in the paper. Exit status 1: a figure is off by more than 2 x without such a term.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulation import OUTPUT, finish, options, start, table
from pipemoe_solvers import ALL_TO_ALL, FIXED, GEMM, table4

from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.machine_profile import find_profile
from tierstore.model.architecture import Architecture
from tierstore.parallel.chunk_degree import pass_seconds
from tierstore.parallel.layout import Layout
from tierstore.plan.fitting import Limits
from tierstore.plan.layout_workload import LayoutChoice, stage_workloads
from tierstore.plan.layouts import layout_cost
from tierstore.plan.papers import all_reduce_ratio, all_to_all_ratio
from tierstore.plan.presets import find_preset
from tierstore.plan.report import plan_run
from tierstore.tiers.slots import DeviceKind
from tierstore.train.config import TrainConfig

#: Data sheets: a V100's half precision and its links in both directions, as Pipeline MoE has them; a node's InfiniBand.
V100_FLOPS, NVLINK, INFINIBAND = 125e12, 300e9, 12.5e9
#: GPUs of a node: in SE-MoE and Pipeline MoE, and in PipeMoE.
NODE, PIPEMOE_NODE = 8, 4
#: The part of a link that transfers reach, as in data-sheet profiles.
REACHED = 0.8


#: What figures are in, by the end of their keys: a size of the printed unit, and its name.
UNITS = {
    "tokens_per_s": (1, "tokens/s"),
    "saved_bytes": (1e9, "GB"),
    "flops_per_s": (1e12, "TFLOP/s"),
    "bytes_per_s": (1e9, "GB/s"),
    "ratio": (1, "x"),
}


@dataclass(frozen=True)
class Row:
    """A published figure and ours, whose unit is ``key`` of ``UNITS``. ``term``: why they differ by more than 2 x;
    ``mended``: ours with that as in the paper.
    """

    table: str
    name: str
    published: float
    ours: float
    key: str = "tokens_per_s"
    term: str = ""
    mended: float | None = None

    @property
    def ratio(self) -> float:
        return self.ours / self.published

    @property
    def near(self) -> bool:
        """Within 2 x of the published figure."""
        return 0.5 <= self.ratio <= 2

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a printed table."""
        size, unit = UNITS[self.key]
        figures = (f"{value / size:,.4g} {unit}" for value in (self.published, self.ours))
        return (self.table, self.name, *figures, f"{self.ratio:.2f}", "" if self.near else self.term)

    def as_json(self) -> dict[str, object]:
        """The row as JSON, with units in the keys."""
        figures = {"published": self.published, "ours": self.ours, "mended": self.mended}
        return {
            "table": self.table,
            "name": self.name,
            **{f"{name}_{self.key}": value for name, value in figures.items()},
            "ours_to_published_ratio": self.ratio,
            "term": "" if self.near else self.term,
        }


# SE-MoE -----------------------------------------------------------------------------------------------------

#: Table 1: GPUs, tokens/s of SE-MoE.
SE_MOE_1 = {
    "se-moe-13.9b": (8, 31_085),
    "se-moe-26.8b": (16, 59_136),
    "se-moe-52.6b": (32, 113_456),
    "se-moe-104.1b": (64, 209_970),
    "se-moe-207.2b": (128, 376_968),
}
#: Table 2: experts; GPUs and as many sequences, tokens/s of SE-MoE. The 10.0e9 row fits no width of the others.
SE_MOE_2 = {"106.5e9": (64, 8, 29_681), "209.6e9": (128, 16, 40_059)}
#: Bytes a second that an A100 of 80 GB reads of its own memory, by its data sheet.
A100_MEMORY = 2.0e12
#: Table 4: widths, and bytes that a partitioned embedding saves.
SE_MOE_4 = {2048: 1.68e9, 4096: 3.10e9, 8192: 7.31e9}


def se_moe_1() -> Iterator[Row]:
    """Speeds of Table 1: a sequence for each GPU, experts and moments in host memory."""
    for name, (gpus, published) in SE_MOE_1.items():
        preset = find_preset(name)
        assert preset.gpu is not None
        settings = {"data.batch_size": gpus, "model.seq_len": 2048, "host_budget": "125GB"}
        plan = plan_run(
            load(TrainConfig, None, {**preset.settings, **settings}),
            Limits(250 * 10**9, 10**13, preset.gpu_memory, sharing=NODE),
            preset=preset,
            ranks=gpus,
            device=DeviceKind.CUDA,
            profile=find_profile(Path(preset.gpu)),
        )
        assert plan.prediction is not None
        yield Row("SE-MoE 1", name, published, plan.prediction.tokens_per_s)


def served(experts: int) -> Architecture:
    """The model of SE-MoE's Table 2 with so many experts a layer."""
    return Architecture.gpt(
        layers=24, d_model=4096, vocab=50304, positions=1024, experts=experts, moe_every=2
    )


def generated_share(published: float, whole: float, one: float) -> float:
    """The share of generated tokens with which ``published`` tokens/s follow from ``whole`` tokens/s of prompts and ``one``
    of generation.
    """
    return (1 / published - 1 / whole) / (1 / one - 1 / whole)


def se_moe_2() -> Iterator[Row]:
    """Speeds of Table 2: passes over whole sequences."""
    a100 = find_profile(Path("A100"))
    for name, (experts, gpus, published) in SE_MOE_2.items():
        active = served(experts).active
        whole = a100.dense_flops.per_s / (2 * active)
        one = REACHED * A100_MEMORY / (2 * active)
        share = generated_share(published / gpus, whole, one)
        yield Row(
            "SE-MoE 2",
            name,
            published,
            gpus * whole,
            term="lengths of prompts and answers are not printed; generation of one token at a time reads every active "
            f"weight for it, {one:.0f} tokens/s a GPU: the published speed has 1 generated token in {1 / share:.0f}",
            mended=gpus / ((1 - share) / whole + share / one),
        )


def se_moe_4() -> Iterator[Row]:
    """Memory that Table 4 saves: 7/8 of 18 bytes a parameter."""
    for width, published in SE_MOE_4.items():
        yield Row("SE-MoE 4", f"width {width:,}", published, 18 * 7 / 8 * 50304 * width, "saved_bytes")


# PipeMoE ----------------------------------------------------------------------------------------------------


def pipemoe_6() -> Iterator[Row]:
    """Fig. 6's constants beside data sheets. Bytes a second: of a node's link, which four GPUs share, a message of P ranks
    takes the part that goes to other nodes.
    """
    sheet = find_profile(Path("RTX2080Ti"))
    yield Row(
        "PipeMoE 6",
        "products, RTX 2080 Ti",
        2 / GEMM[1],
        sheet.dense_flops.per_s,
        "flops_per_s",
        term="single large products reach 91% of the 53.8 that the data sheet states; the profile's 40% is that of whole "
        "training steps",
        mended=0.91 * 53.8e12,
    )
    for gpus, (_, beta) in ALL_TO_ALL.items():
        ours = REACHED * INFINIBAND / PIPEMOE_NODE / ((gpus - PIPEMOE_NODE) / gpus)
        yield Row("PipeMoE 6", f"all-to-all, {gpus} GPUs", 1 / beta, ours, "bytes_per_s")


def pipemoe_4() -> dict[int, dict[str, Any]]:
    """Fig. 4 by the model, of all layers of Table IV, by GPUs: how often each fixed number of chunks is the best, and by how
    much longer the worst one takes at most.
    """
    found = {}
    for gpus in ALL_TO_ALL:
        layers = [layer for layer in table4() if layer.gpus == gpus]
        times = [{r: sum(pass_seconds(*one, r) for one in layer.passes) for r in FIXED} for layer in layers]
        best = Counter(min(each, key=each.__getitem__) for each in times)
        worst = max(max(each.values()) / min(each.values()) - 1 for each in times)
        found[gpus] = {"best_count": best, "worst_ratio": worst}
    return found


# Pipeline MoE -----------------------------------------------------------------------------------------------


def ppmoe_1_and_3() -> Iterator[Row]:
    """Communication over computation in Tables 1 and 3, by equations 2 and 5 corrected. Of 64 ranks 8 are on a node, and
    share its link.
    """
    # Milliseconds: two all-to-alls, and the experts as what is left of MoE layers and gating.
    experts = 6294 - 2566 - 2423 - 156
    outside = 64 / 63 * (64 - NODE) / 64
    ours = all_to_all_ratio(64, 4096, V100_FLOPS, INFINIBAND / NODE) * outside
    yield Row("PPMoE 1", "all-to-all / experts", (2566 + 2423) / 2 / experts, ours, "ratio")
    ours = all_reduce_ratio(NODE, 1024, V100_FLOPS, NVLINK / 2)
    yield Row("PPMoE 3", "all-reduce / network", 1176 / (1714 - 1176), ours, "ratio")


@dataclass(frozen=True)
class Trained:
    """A row of Table 2: tokens/s a GPU of the model ``preset``, or (``dense``) of its backbone, in ``layout``."""

    preset: str
    layout: Layout
    published: float
    dense: bool = False
    #: Why ours is off by more than 2 x, and the sequences a step with which it is not.
    term: str = ""
    sequences: int | None = None

    @property
    def name(self) -> str:
        way = "dense" if self.dense else "PPMoE" if self.layout.tensor > 1 else "DPMoE"
        return f"{self.preset}, {way}, {LayoutChoice(self.layout).name}"

    def speed(self, sequences: int | None = None) -> float:
        """Tokens/s a GPU, with so many sequences a step (default: GPT-3's)."""
        preset, layout = find_preset(self.preset), self.layout
        assert preset.gpu is not None
        small = self.preset == "ppmoe-6.7b"
        each, most = (sequences or 256, 16) if small else (sequences or 1024, 32)
        micro = max(each // layout.data // most, 1)
        settings = {
            "model.moe_every": 0 if self.dense else 2,
            "model.tie_embeddings": "untied",
            "data.batch_size": each // micro,
            "data.micro_batches": micro,
            "data.micro_order": "micro",
            "host_budget": "2TB",
            "links.node.bandwidth": int(REACHED * INFINIBAND / NODE),
        }
        config = load(TrainConfig, None, {**preset.settings, **settings})
        works = list(
            stage_workloads(
                config,
                LayoutChoice(layout),
                find_profile(Path(preset.gpu)),
                NODE,
                device=DeviceKind.CUDA,
                device_memory=preset.gpu_memory,
            )
        )
        return config.tokens_per_step / layout_cost(works).step_s / layout.world


SMALL, LARGE = "ppmoe-6.7b", "ppmoe-143b"
#: Rows whose experts are over data ranks and whose matrices are over tensor ranks are left out: tierstore has experts over
#: either.
PPMOE_2 = (
    Trained(SMALL, Layout(4, 1, 8, 8), 3244, dense=True),
    Trained(SMALL, Layout(1, 4, 8, 8), 4174, dense=True),
    Trained(SMALL, Layout(1, 32, 1, 1), 5120, dense=True),
    Trained(
        SMALL,
        Layout(1, 1, 32, 1),
        2147,
        term="sequences a step are not printed, and each step sums all dense gradients between nodes: 256 here",
        sequences=128,
    ),
    Trained(SMALL, Layout(4, 1, 8, 8), 2708),
    Trained(LARGE, Layout(16, 1, 8, 8), 356, dense=True),
    Trained(LARGE, Layout(1, 16, 8, 8), 597, dense=True),
    Trained(LARGE, Layout(1, 128, 1, 1), 410, dense=True),
    Trained(LARGE, Layout(1, 4, 64, 1), 93),
    Trained(LARGE, Layout(16, 1, 8, 8), 323),
)


def ppmoe_2() -> Iterator[Row]:
    """Speeds of Table 2, a GPU."""
    for row in PPMOE_2:
        mended = None if row.sequences is None else row.speed(row.sequences)
        yield Row("PPMoE 2", row.name, row.published, row.speed(), term=row.term, mended=mended)


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "SE-MoE-1": se_moe_1,
    "SE-MoE-2": se_moe_2,
    "SE-MoE-4": se_moe_4,
    "PipeMoE-6": pipemoe_6,
    "PPMoE-1-3": ppmoe_1_and_3,
    "PPMoE-2": ppmoe_2,
}


def main() -> None:
    asked = options(__doc__, tables=tuple(TABLES))
    if wrong := [name for name in asked.tables if name not in TABLES]:
        raise ConfigError(f"--tables: expected some of {', '.join(TABLES)}, got {wrong[0]!r}")
    rows = [row for name in asked.tables for row in TABLES[name]()]
    OUTPUT.table(
        "published figures and ours",
        ("table", "row", "published", "ours", "ours / published", "what differs"),
        [row.cells for row in rows],
    )
    fourth = pipemoe_4()
    table(
        "PipeMoE, Fig. 4: the best of fixed numbers of chunks by the model, all layers of Table IV",
        [{"GPUs": gpus, **{str(r): each["best_count"][r] for r in FIXED}, **each} for gpus, each in fourth.items()],
        *("GPUs", *map(str, FIXED), "worst_ratio"), **{str(r): f"r = {r}" for r in FIXED},
    )  # fmt: skip
    without = [row for row in rows if not row.near and (row.mended is None or not row.term)]
    finish(
        {"rows": rows, "pipemoe_figure_4": fourth},
        [f"{row.table}, {row.name}: {row.ratio:.2f} of the published figure" for row in without],
    )


if __name__ == "__main__":
    start(main)
