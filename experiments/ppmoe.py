"""Pipeline MoE against experts over data ranks: bytes by link, and how fast links within the group must be for it to pay.

    python experiments/ppmoe.py [--tokens 1024] [--width 128] [--rounds 5] [--pass-s 0.1] [--seq-len 32] [--steps 2]

Three ways to bring S tokens of T ranks to their experts and back take turns, over real ranks on Gloo: ``rows`` (the
ranks have the same tokens, and send the rows of their experts back: ``tierstore.moe.exchange``), ``all-reduce`` (the
same with the paper's sum over ranks) and ``all-to-all`` (each rank has S / T tokens: ``tierstore.moe.exchange``). The
first two use a link within the group, the last one between groups, both limited (``LimitedGroup``).

* **Bytes**: what ranks sent, from their own counters, against ``tierstore.plan.papers``'s formulas, to the byte: of the
  messages timed here, and of whole passes over experts, forward and backward.
* **Crossover**: the link between groups is such that two all-to-alls take ``pass_s``. The link within is swept around the
  speed at which both should take equally long: ``T / K`` times as fast for the all-reduce, ``T / 2`` for rows. Where the
  ratio of times (medians over rounds of ways that took turns) falls to 1 is found on logarithmic scales.

The noise floor is the difference of two all-to-alls of one round. Experts are chosen in turns, so loads are equal.

* **Twins** (Tables 2 and 3): steps of a MoE, with one of 8 experts a token in every other block, and of its dense
  backbone, in the same layouts on the emulated device of ``layouts.py``, and the parts of the MoE's forward passes. What
  a link carries for an operation of the device is the paper's: two all-to-alls between groups are 65.5% of a forward
  pass (Table 1), an all-reduce within takes 2.2 times as long as a network (Table 3). Stages send within, too.

Exit status 1: bytes are not those of the formulas.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import layouts
import torch
from emulation import OUTPUT, TIMEOUT_S, finish, options, run_ranks, start, table, timed
from torch import Tensor

from tierstore._native import Link
from tierstore.moe import ExpertShape, InMemoryExperts, SaveActivations
from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.dispatch import Dispatch, dispatch
from tierstore.moe.exchange import ExchangedRows, IndexedRows, Rows
from tierstore.parallel import Channel, LimitedGroup, ParallelConfig, RankGroup, launch
from tierstore.parallel.hierarchical import FlatExchange
from tierstore.parallel.layout import Layout
from tierstore.plan.layout_workload import LayoutChoice
from tierstore.plan.papers import RowBytes
from tierstore.stats import median_line
from tierstore.train.trainer import Trainer
from tierstore.units import format_seconds

#: (T, K): tensor-parallel ranks, experts a token.
CASES = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
EXPERTS = 8
ITEM_BYTES = 4
COLUMNS = ("sent_bytes", "formula_bytes", "passes_bytes", "passes_formula_bytes")
#: Speeds within the group, in times of the one at which both ways should take equally long.
SWEEP = (0.6, 0.8, 1.0, 1.25, 1.6)
#: By how much a crossover that was found may differ from the predicted one.
TOLERANCE = 0.15
#: Of the twins' rows and all-reduces, bytes a second: between groups, and within one.
BETWEEN, WITHIN = 133_000, 475_000
RATIOS = ("speed", "to_slowest", "moe", "gating", "experts", "rows", "network", "network_all_reduce")


def crossing(speeds: Sequence[float], ratios: Sequence[float]) -> float | None:
    """The speed at which ``ratios`` fall to 1, by the line through the medians of slopes and intercepts on logarithmic
    scales (Theil and Sen); None where that lies outside of ``speeds`` (ascending).
    """
    slope, intercept = median_line([math.log(each) for each in speeds], [math.log(each) for each in ratios])
    if slope >= 0:
        return None
    found = math.exp(-intercept / slope)
    return found if speeds[0] <= found <= speeds[-1] else None


def formulas(tokens: int, width: int, ranks: int, top_k: int) -> RowBytes:
    return RowBytes(tokens=tokens, width=width, itemsize=ITEM_BYTES, ranks=ranks, top_k=top_k)


def expected_speeds(of: RowBytes) -> dict[str, float]:
    return {"rows": of.rows_crossover, "all-reduce": of.all_reduce_crossover}


class Case:
    """The messages of one case on one rank, over groups of the same ranks with limits of their own."""

    def __init__(self, world: RankGroup, tokens: int, width: int, top_k: int) -> None:
        self._world, self._width, self._top_k = world, width, top_k
        self.formulas = formulas(tokens, width, world.size, top_k)
        turn_T = torch.arange(tokens) % EXPERTS
        #: Token i goes to experts i, i + 1, ...: in any run of tokens each expert is chosen equally often.
        expert_TK = (turn_T.unsqueeze(1) + torch.arange(top_k)) % EXPERTS

        def plan(chosen_TK: Tensor) -> Dispatch:
            return dispatch(chosen_TK, torch.bincount(chosen_TK.flatten(), minlength=EXPERTS))

        self._whole, self._own = plan(expert_TK), plan(expert_TK[: tokens // world.size])
        share = EXPERTS // world.size
        self._starts = tuple(share * rank for rank in range(world.size + 1))
        self._tokens_SD = torch.zeros(tokens, width)
        self._buffers = {each: torch.zeros(each.rows + 1, width) for each in (self._whole, self._own)}

    def measure(self, rounds: int, pass_s: float) -> dict[str, Any]:
        between = self.formulas.all_to_all / pass_s
        times: dict[str, list[float]] = {}
        noise = []
        for way, expected in expected_speeds(self.formulas).items():
            times[way] = []
            for speed in SWEEP:
                link, other = self._group(speed * expected * between), self._group(between)
                ratios = []
                for number in range(rounds + 1):
                    within = timed(self._world, partial(self._send, way, link))
                    across, again = (
                        timed(self._world, partial(self._send, "all-to-all", other)) for _ in range(2)
                    )
                    if number:  # the first touches memory, and opens connections
                        ratios.append(2 * within / (across + again))
                        noise.append(abs(across / again - 1))
                times[way].append(statistics.median(ratios))
        return {
            "sent": {way: self._sent(way) for way in ("rows", "all-reduce", "all-to-all")},
            "passes": {way: self._passes(way) for way in ("rows", "all-to-all")},
            "times": times,
            "noise": statistics.median(noise),
        }

    def _group(self, bandwidth: float) -> RankGroup:
        """The world's ranks over a link of their own."""
        world = self._world
        communicators = {channel: world.communicator(channel) for channel in Channel}
        return LimitedGroup(world.rank, world.ranks, communicators, link=Link(bandwidth))

    def _plan(self, way: str) -> Dispatch:
        return self._whole if way == "rows" else self._own

    def _send(self, way: str, group: RankGroup) -> None:
        """The messages of a forward pass."""
        if way == "all-reduce":
            group.all_reduce(self._tokens_SD).wait()
            return
        rows_ND = self._buffers[self._plan(way)]
        rows = self._rows(way, group)
        rows_MD = rows.at_experts(rows_ND)
        (chunk,) = rows.chunks(1)
        chunk.to_experts(rows_ND, rows_MD).wait()
        chunk.to_tokens(rows_MD, rows_ND).wait()

    def _rows(self, way: str, group: RankGroup) -> Rows:
        asked = tuple(range(self._starts[group.rank], self._starts[group.rank + 1]))
        if way == "rows":
            return IndexedRows(group, self._starts, self._whole, asked)
        loads = [stop - start for start, stop in itertools.pairwise(self._own.offsets)]
        return ExchangedRows(FlatExchange(group), self._starts, torch.tensor([loads] * group.size), asked)

    def _sent(self, way: str) -> int:
        group = self._group(math.inf)
        self._send(way, group)
        return bytes_of(group)

    def _passes(self, way: str) -> int:
        """What a pass over experts sends, forward and backward."""
        group, plan = self._group(math.inf), self._plan(way)
        shape = ExpertShape(self._width, 8)
        source = InMemoryExperts(shape, layers=[0], experts=EXPERTS)
        rows = self._rows(way, group)
        call = ExpertPass(0, shape, source, plan, rows, Weighting.BY_EXPERT, SaveActivations.SAVE)
        tokens = plan.place_TK.shape[0]
        x_TD = torch.ones(tokens, self._width, requires_grad=True)
        weight_TK = torch.ones(tokens, self._top_k, requires_grad=True)
        torch.autograd.backward(compute_experts(x_TD, weight_TK, call).sum())
        return bytes_of(group)


def bytes_of(group: RankGroup) -> int:
    return sum(traffic.sent_bytes for traffic in group.traffic.values())


def rank(cases: Sequence[int], tokens: int, width: int, rounds: int, pass_s: float) -> list[dict[str, Any]]:
    with launch(ParallelConfig(timeout_s=TIMEOUT_S), device="cpu") as mesh:
        return [Case(mesh.world, tokens, width, top_k).measure(rounds, pass_s) for top_k in cases]


def result(of: RowBytes, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One case: what all ranks sent beside the formulas, and its crossovers."""
    ranks, top_k = of.ranks, of.top_k
    # A row's weight goes beside its gradient, to the expert and back; rows that stay need it once.
    weights = top_k * of.tokens * (ranks - 1) / ranks * ITEM_BYTES
    messages = {"rows": of.rows, "all-reduce": of.all_reduce, "all-to-all": of.all_to_all}
    passes = {"rows": 2 * of.rows + weights, "all-to-all": 2 * of.all_to_all + 2 * weights / ranks}
    sent = {}
    for way, each in messages.items():
        sent[way] = {
            "sent_bytes": sum(rank["sent"][way] for rank in found),
            "formula_bytes": round(ranks * each),
        }
        if way in passes:
            sent[way]["passes_bytes"] = sum(rank["passes"][way] for rank in found)
            sent[way]["passes_formula_bytes"] = round(ranks * passes[way])
    crossovers = {}
    for way, expected in expected_speeds(of).items():
        times = found[0]["times"][way]  # all ranks see the same seconds
        speeds = [speed * expected for speed in SWEEP]
        crossovers[way] = {
            "expected_ratio": expected,
            "found_ratio": crossing(speeds, times),
            "link_ratio": speeds,
            "time_ratio": times,
        }
    return {
        "tensor_ranks_count": ranks, "top_k_count": top_k, "sent": sent, "crossovers": crossovers,
        "noise_ratio": found[0]["noise"],
    }  # fmt: skip


def failures(case: dict[str, Any]) -> list[str]:
    return [
        f"{case['tensor_ranks_count']} ranks, {case['top_k_count']} experts a token, {way}: sent {of[f'{kind}_bytes']} "
        f"bytes, the formula gives {of[formula]}"
        for way, of in case["sent"].items()
        for kind, formula in (("sent", "formula_bytes"), ("passes", "passes_formula_bytes"))
        if of.get(f"{kind}_bytes") != of.get(formula)
    ]


def watch_parts(trainer: Trainer) -> Counter[str]:
    """From now on adds up the ns of forward passes by module, and (``<module> waits``) of the messages in them."""
    parts: Counter[str] = Counter()

    def add(sign: int, part: str) -> None:
        parts.update({part: sign * time.perf_counter_ns(), f"{part} waits": sign * trainer.ledger.total_ns})

    for name, module in trainer.model.module.named_modules():
        if (part := name.rpartition(".")[2]) in ("", "mixture", "router", "ffn"):
            module.register_forward_pre_hook(lambda *_, part=part: add(-1, part), prepend=True)
            module.register_forward_hook(lambda *_, part=part: add(1, part))
    return parts


def twin_rank(twins: Sequence[layouts.Case], directory: Path, steps: int) -> list[Any]:
    """Seconds of ``steps`` steps of each twin, and the parts of their forward passes."""
    watched = ((trainer, watch_parts(trainer)) for trainer in layouts.sessions(twins, directory))
    return [(layouts.timed(trainer, steps), parts) for trainer, parts in watched]


def compare(ranks: int, seq_len: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """A MoE and its dense backbone in layouts of ``ranks`` ranks, in which a step has the same tokens."""
    twins, answers, found = [], [], []
    counts = (1, 1, ranks, 1), (1, ranks // 2, 2, 2), (ranks // 2, 1, 2, 2)
    for layout, every in itertools.product(dict.fromkeys(Layout(*of) for of in counts), (0, 2)):
        size = {"rows": 4, "seq_len": seq_len, "layers": 4, "micro_batches": ranks // layout.data}
        link = BETWEEN if layout.tensor == 1 else WITHIN
        further = {
            "model.d_ff": 256,
            "model.top_k": 1,
            "model.moe_every": every,
            "links.exchange.bandwidth": link,
        }
        choice = LayoutChoice(layout)
        twins.append(layouts.Case(kind="twin", choice=choice, further=tuple(further.items()), **size))
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as made:
            (Path(made) / "text").write_bytes(random.Random(0).randbytes(layouts.TEXT_BYTES))
            answers += run_ranks(twin_rank, ranks, twins, Path(made), steps)
    by_twin = [*zip(*answers, strict=True)]  # a step is as long on all ranks
    step_s = [statistics.median(each for taken, _ in of for each in taken) for of in by_twin]
    for number in range(1, len(twins), 2):
        dense_s, moe_s = step_s[number - 1 : number + 1]
        of: Counter[str] = sum((own for _, own in by_twin[number]), Counter())
        moe, gating = of["mixture"], of["router"]
        rows = of["mixture waits"] - of["router waits"]  # what brings tokens to their experts and back
        spent = moe, gating, moe - gating - rows, rows, of["ffn"], of["ffn waits"]
        ratios = dense_s / moe_s, max(step_s[::2]) / moe_s, *(part / of[""] for part in spent)
        row = {"layout": twins[number].choice.name, "backbone_step_s": dense_s, "moe_step_s": moe_s}
        found.append(row | {f"{name}_ratio": ratio for name, ratio in zip(RATIOS, ratios, strict=True)})
    return found


def main() -> None:
    asked = options(__doc__, ranks=(2, 4), tokens=1024, width=128, rounds=5, pass_s=0.1, seq_len=32, steps=2)
    cases = []
    for ranks in asked.ranks:
        top_ks = [top_k for size, top_k in CASES if size == ranks]
        answers = run_ranks(rank, ranks, top_ks, asked.tokens, asked.width, asked.rounds, asked.pass_s)
        for number, top_k in enumerate(top_ks):
            of = formulas(asked.tokens, asked.width, ranks, top_k)
            cases.append(result(of, [answer[number] for answer in answers]))
    sent, crossovers = (
        [{**case, "way": way, **of} for case in cases for way, of in case[part].items()]
        for part in ("sent", "crossovers")
    )
    case_of = ("tensor_ranks_count", "top_k_count", "way")
    title = f"bytes of all ranks, {asked.tokens} tokens of {asked.width} elements, gloo"
    table(title, sent, *case_of, *COLUMNS)
    table(
        "the speed of links within the group, in times of those between, at which both take equally long "
        f"({format_seconds(asked.pass_s)} a pass, {asked.rounds} rounds)",
        crossovers, *case_of, "expected_ratio", "found_ratio", "noise_ratio",
    )  # fmt: skip
    compared = [of for n in asked.ranks for of in compare(n, asked.seq_len, asked.rounds, asked.steps)]
    table(
        f"a MoE and its dense backbone: steps (medians of {asked.rounds} rounds of {asked.steps}), parts of forward passes",
        compared, "layout", "backbone_step_s", "moe_step_s", *(f"{name}_ratio" for name in RATIOS),
    )  # fmt: skip
    near = sum(
        of["found_ratio"] is not None and abs(of["found_ratio"] / of["expected_ratio"] - 1) <= TOLERANCE
        for of in crossovers
    )
    OUTPUT.line(f"crossovers within {TOLERANCE:.0%} of the expected: {near} of {len(crossovers)}")
    finish({"cases": cases, "twins": compared}, [each for case in cases for each in failures(case)])


if __name__ == "__main__":
    start(main)
