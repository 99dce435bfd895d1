"""What training refuses before it begins: the type of each error, and the settings, files and values that it names."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plain_reference import PlainTrainer
from rank_cases import TINY, alone
from refusals import Refusal, refuses
from stage_cases import STAGED

from tierstore.config import load
from tierstore.dense import Fusion
from tierstore.dense.layout import Narrow
from tierstore.errors import BudgetError, ConfigError, DataError, StoreFormatError
from tierstore.machine_profile import ASSUMED, Cost, save_profile
from tierstore.model import ModelConfig
from tierstore.model.spec import spec_of
from tierstore.model.store_schema import STATE_KEY, TrainState
from tierstore.moe.source import Chunking
from tierstore.parallel import RankGroup
from tierstore.parallel.config import ParallelConfig, RowPlacement
from tierstore.parallel.layout import Division, Layout
from tierstore.store.adamw import AdamWConfig
from tierstore.tiers.slots import DeviceKind
from tierstore.train.budgets import split_boundaries
from tierstore.train.chunk_control import ChunkControl
from tierstore.train.combinations import Feature, pairing
from tierstore.train.config import ScheduleConfig, TrainConfig
from tierstore.train.data import TextData
from tierstore.train.files import DataConfig, text_files
from tierstore.train.stages import one_forward_one_backward, stage_blocks, stage_config
from tierstore.train.stored_model import DenseCut, DenseParameter
from tierstore.train.tasks import TaskRows, assign
from tierstore.train.vocabulary import choose_vocabulary

Act = Callable[[Path], object]
Error = type[Exception]
QUICK, DIVIDED = Cost(0.0, 1e5), RowPlacement.PARTITIONED
#: Large enough for AUTO to divide tables.
LARGE: dict[str, Any] = {"model.vocab_size": 151_936, "model.d_model": 512, "data.batch_size": 4}
TABLES: dict[str, Any] = {f"tasks.{name}.paths": ["x"] for name in ("one", "two")}


def configured(settings: Mapping[str, Any]) -> TrainConfig:
    return load(TrainConfig, None, {**TINY, **settings})


def loads(text: str) -> Act:
    """Loads a configuration file of ``text``."""

    def act(directory: Path) -> None:
        path = directory / "run.toml"
        path.write_text(text)
        load(TrainConfig, path)

    return act


def chunks(settings: Mapping[str, Any], sharing: int) -> ChunkControl:
    """The number of chunks of the first of ``sharing`` ranks."""
    group = RankGroup(0, range(sharing), {})
    return ChunkControl(configured(settings), replace(alone(), data=group, expert=group), Chunking())


def profiled(sharing: int, content: str | None = "{}", **changes: Any) -> Act:
    """Chunks by a profile: one with ``changes``, or a file of ``content`` (None: no file)."""

    def act(directory: Path) -> None:
        path = directory / "p.json"
        if changes:
            made = replace(ASSUMED, ranks=2, expert_forward=QUICK, expert_backward=QUICK, machine="by hand")
            save_profile(replace(made, **changes), path)
        elif content is not None:
            path.write_text(content)
        model = {"model.experts": 8, "model.top_k": 8}
        chunks({**model, "parallel.profile": str(path)}, sharing)

    return act


def cut(stages: int, given: tuple[int, ...] = (), moe_every: int = 1) -> Act:
    model = ModelConfig(n_layers=4, moe_every=moe_every)
    return lambda _: stage_blocks(model.architecture, stages, given)


def staged(**changes: Any) -> Act:
    told = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda _: stage_config(configured({**STAGED, "parallel.stages": 2, **told}), 0, 2)


def tables(settings: Mapping[str, Any], device: DeviceKind = DeviceKind.CPU) -> Act:
    config = {**LARGE, **settings}
    return lambda _: choose_vocabulary(load(TrainConfig, None, config), ranks=4, device=device)


def imported_tables(_: Path) -> None:
    config = load(TrainConfig, None, LARGE)
    foreign: Any = SimpleNamespace(
        vocab_size=151_936, d_model=512, seq_len=256, compute_dtype=config.model.compute_dtype
    )
    choose_vocabulary(replace(config, model=foreign, parallel=ParallelConfig(head=DIVIDED)), ranks=2)


def text(name: str, size: int | None = None, seq_len: int = 64) -> Act:
    """The data of one file of ``size`` bytes (None: there is none)."""

    def act(directory: Path) -> None:
        path = directory / name
        if size is not None:
            path.write_bytes(b"x" * size)
        data_of(path, seq_len)

    return act


def data_of(path: Path, seq_len: int = 64) -> TextData:
    return TextData(DataConfig(paths=(str(path),), batch_size=4), seq_len=seq_len)


def unreadable(directory: Path) -> None:
    path = directory / "short.txt"
    path.write_bytes(bytes(100))
    path.chmod(0)
    data_of(path, 8)


def micro_batch_beyond(directory: Path) -> None:
    path = directory / "a.txt"
    path.write_bytes(bytes(4000))
    config = DataConfig(paths=(str(path),), batch_size=4, micro_batches=3)
    TextData(config, seq_len=8).batch(0, 3)


def piped(*, named: bool) -> Act:
    def act(directory: Path) -> None:
        (directory / "a.txt").write_text("text")
        pipe = directory / "b.txt"
        os.mkfifo(pipe)
        text_files(DataConfig(paths=(str(pipe if named else directory),)))

    return act


def odd_parameter(_: Path) -> None:
    odd = DenseParameter((6, 4), Narrow.NO, Division(0, blocks=3))
    units = [("embedding", (odd,))] * 3
    DenseCut(units, Layout(1, 1, 4, 4), Fusion.UNIT, blocks=[range(1)])


def a_stage() -> Any:
    return spec_of(ModelConfig(n_layers=4)).stage(range(3), held=2)


def plain(**changes: Any) -> Act:
    model = {"d_model": 32, "n_layers": 3, "n_heads": 2, "seq_len": 16, "d_ff": 24, "experts": 8}
    options = {"clip_norm": changes.pop("clip_norm")} if "clip_norm" in changes else {}
    config = ModelConfig(**{**model, **changes})
    return lambda _: PlainTrainer(config, ScheduleConfig(), AdamWConfig(), **options)


#: By the name of a setting: values that it cannot have.
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("kind", {"kind": "wavy"}),
    ("lr", {"lr": 0.0}),
    ("lr", {"lr": math.inf}),
    ("total_steps", {"total_steps": 0}),
    ("warmup_steps", {"warmup_steps": -1}),
    ("min_lr_fraction", {"min_lr_fraction": 1.5}),
]
DATA: list[tuple[str, float]] = [
    ("max_bytes", 0),
    ("batch_size", 0),
    ("micro_batches", 0),
    ("validation_fraction", 0.0),
    ("validation_fraction", 1.0),
]
ONE = '[tasks.a]\npaths = ["x"]\n'
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "weight": (ONE + "weight = 0", ("[tasks.a] weight:", "got 0")),
    "paths": ("[tasks.a]", ("[tasks.a] paths:", "got none")),
    "no-table": ("tasks.a = 3", ("tasks.a:", "got 3")),
    "no-tables": ("tasks = 3", ("tasks:", "got 3")),
    "name": ('[tasks."a b"]\npaths = ["x"]', ("tasks:", "'a b'")),
    "misspelt": (ONE + "wieght = 2", ("tasks.a.wieght:", "weight")),
    "twice": (ONE + '[tasks.a]\npaths = ["y"]', ("run.toml", "TOML")),
    "rows": (ONE + "rows = 17", ("data.batch_size:", " 17,", "got 16")),
    "no-rows-left": (
        ONE + 'rows = 16\n[tasks.b]\npaths = ["x"]',
        ("data.batch_size:", " 16 and", " b,", "got 16"),
    ),
    "data": ('[data]\npaths = ["x"]\n' + ONE, ("data.paths:", "tasks.NAME.paths")),
}
DEGREE, PROFILE, HEAD = "parallel.pipeline_degree:", "parallel.profile:", "parallel.head:"
STAGES, BLOCKS = "parallel.stages:", "parallel.stage_blocks:"
BACKWARD_MISSING: dict[str, Any] = {"exchanges": {2: QUICK}, "expert_backward": None}
ROWS: list[tuple[str, Act, Error, tuple[str, ...]]] = [
    *(
        (
            f"schedule-{name}-{next(iter(given.values()))}",
            lambda _, g=given: ScheduleConfig(**g),
            ConfigError,
            (f"{name}:",),
        )
        for name, given in SCHEDULES
    ),
    *(
        (
            f"data-{name}-{value}",
            lambda _, n=name, v=value: DataConfig(**{n: v}),
            ConfigError,
            (f"{name}:", str(value)),
        )
        for name, value in DATA
    ),
    *((f"tasks-{name}", loads(given), ConfigError, named) for name, (given, named) in TASKS.items()),
    (
        "tasks-unknown-option",
        lambda _: load(TrainConfig, None, {"tasks.a.what": "1"}),
        ConfigError,
        ("tasks.a.what:",),
    ),
    ("assign-no-task", lambda _: assign((), 2), ValueError, ("one task",)),
    ("assign-no-rank", lambda _: assign((TaskRows("a", 1, 1),), 0), ValueError, ("one rank",)),
    ("assign-no-row", lambda _: assign((TaskRows("a", 0, 1),), 1), ValueError, ("one row",)),
    ("assign-no-cost", lambda _: assign((TaskRows("a", 1, 0),), 1), ValueError, ("cost 1",)),
    ("data-empty", text("empty.txt", 0), DataError, ("empty.txt", "0 bytes")),
    ("data-short", text("short.txt", 100), DataError, ("short.txt", "100 B", "seq_len 64")),
    ("data-missing", text("gone.txt"), DataError, ("gone.txt", "nothing")),
    ("data-no-files", data_of, DataError, ("files",)),
    *([("data-no-permission", unreadable, DataError, ("short.txt", "read"))] if os.geteuid() else []),
    # Fails even for root: a file that exists and cannot be read.
    ("data-unreadable", lambda _: data_of(Path("/proc/self/mem"), 8), DataError, ("/proc/self/mem",)),
    ("data-micro-batch", micro_batch_beyond, ValueError, ("micro-batch 3", "3")),
    ("data-pipe-named", piped(named=True), DataError, ("b.txt", "pipe")),
    ("data-pipe-in-a-directory", piped(named=False), DataError, ("b.txt", "pipe")),
    (
        "chunks-by-ranks-2",
        lambda _: chunks({DEGREE[:-1]: 49}, 2),
        ConfigError,
        (DEGREE, "at most 48", "got 49"),
    ),
    (
        "chunks-by-ranks-4",
        lambda _: chunks({DEGREE[:-1]: 17}, 4),
        ConfigError,
        (DEGREE, "auto-split or at most 16", "16 parts of an expert", "4 ranks", "got 17"),
    ),
    ("chunks-by-ranks-8", lambda _: chunks({DEGREE[:-1]: 17}, 8), ConfigError, (DEGREE, "at most 16")),
    *(
        (f"chunks-{wrong}", lambda _, w=wrong: configured({DEGREE[:-1]: w}), ConfigError, (DEGREE, "auto"))
        for wrong in ("0", "-1", "many")
    ),
    ("profile-missing", profiled(2, None), ConfigError, (PROFILE, "p.json", "No such file")),
    ("profile-damaged", profiled(2), ConfigError, (PROFILE, "p.json", "version 1")),
    ("profile-old", profiled(2, exchanges={}), ConfigError, (PROFILE, "p.json", "exchanges")),
    ("profile-forward", profiled(2, **BACKWARD_MISSING), ConfigError, (PROFILE, "p.json", "expert_backward")),
    (
        "profile-other-ranks",
        profiled(4, exchanges={2: QUICK, 8: QUICK}),
        ConfigError,
        (PROFILE, "p.json", "4 ranks", "2, 8"),
    ),
    ("stages-more-than-blocks", cut(5), ConfigError, (STAGES, "4 blocks", "got 5")),
    ("stages-blocks-sum", cut(2, (1, 2)), ConfigError, (BLOCKS, "2", "4 blocks", "[1, 2]")),
    ("stages-blocks-count", cut(2, (4,)), ConfigError, (BLOCKS, "2", "[4]")),
    ("stages-blocks-none", cut(2, (0, 4)), ConfigError, (BLOCKS, "at least 1", "[0, 4]")),
    ("stages-without-experts", cut(4, (), 2), ConfigError, (STAGES, "stage 0", "0 to 0", "experts")),
    ("stages-order", lambda _: one_forward_one_backward(2, 2, 4), ValueError, ("0 to 1", "got 2")),
    (
        "stages-micro-batches",
        staged(data__micro_batches=1),
        ConfigError,
        ("data.micro_batches:", "2", "got 1"),
    ),
    (
        "stages-tied",
        staged(model__tie_embeddings="tied"),
        ConfigError,
        (STAGES, "model.tie_embeddings = tied"),
    ),
    ("stages-given", staged(parallel__stage_blocks=(4,)), ConfigError, (BLOCKS, "[4]")),
    ("stages-zero", lambda _: ParallelConfig(stage_blocks=(0, 2)), ConfigError, ("stage_blocks",)),
    ("stages-of-a-stage", lambda _: a_stage().check_stages(), ConfigError, (STAGES, "a stage")),
    (
        "stages-layer-order",
        lambda _: a_stage().layer_order_bytes(8, 2),
        ConfigError,
        ("data.micro_order:", "stage"),
    ),
    ("tensor-parts", odd_parameter, ValueError, ("3 x 4",)),
    (
        "tables-tied",
        tables({"model.tie_embeddings": "tied", "parallel.embedding": "gathered", HEAD[:-1]: "partitioned"}),
        ConfigError,
        (HEAD, "gathered", "the embedding", "got partitioned"),
    ),
    (
        "tables-stepped-elsewhere",
        tables({"parallel.embedding": "partitioned", "dense.optimizer_state": "host"}, DeviceKind.CUDA),
        ConfigError,
        ("parallel.embedding:", "gathered", "stepped"),
    ),
    ("tables-tasks", tables({**TABLES, HEAD[:-1]: "partitioned"}), ConfigError, (HEAD, "gathered", "tasks")),
    ("tables-imported", imported_tables, ConfigError, (HEAD, "gathered", "imported")),
    (
        "boundaries-budget",
        lambda _: split_boundaries(3, 2, 5000, 4 * 4096 - 1),
        BudgetError,
        ("boundary_budget:", f"{2 * 2 * 4096} bytes"),
    ),
    ("pair-of-one", lambda _: pairing(Feature.LORA, Feature.LORA), ValueError, ("two features", "LoRA")),
    *(
        (
            f"state-{name}",
            lambda _, s=state: TrainState.unpack(s, where="here"),
            StoreFormatError,
            ("here: ",),
        )
        for name, state in (
            ("none", {}),
            ("damaged", {STATE_KEY: b"{"}),
            ("unknown", {STATE_KEY: b'{"colour": 1}'}),
        )
    ),
    ("plain-clip-norm", plain(clip_norm=0.0), ConfigError, ("clip_norm",)),
    ("plain-capacity", plain(capacity_factor=1.0), ConfigError, ("capacity_factor",)),
]


@pytest.mark.parametrize("refusal", [Refusal(*row) for row in ROWS], ids=lambda refusal: str(refusal.name))
def test_it_is_refused_by_name(tmp_path: Path, refusal: Refusal) -> None:
    with refuses(refusal.error, *refusal.named):
        refusal.act(tmp_path)
