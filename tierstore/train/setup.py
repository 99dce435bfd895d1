"""Setup of a session before it touches the store's directory: checks, data, agreement of the ranks (``prepare``).

A run that is refused here has created and changed nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch

from tierstore.accelerator import has_own_memory, make_current, usable_bytes
from tierstore.dense import OptimizerState
from tierstore.errors import ConfigError
from tierstore.machine import MemoryAccount, resident_bytes
from tierstore.model.config import ModelConfig
from tierstore.model.spec import divided_units
from tierstore.model.store_schema import STATE_KEY, TrainState, table_of
from tierstore.parallel import Mesh, RankEnvironment, rank_device
from tierstore.prefetch.plan import StepTiming
from tierstore.stats import OnProgress, StallKey, StallLedger
from tierstore.store.disk.home import rank_directory
from tierstore.store.reading import read_schemas, read_states
from tierstore.tiers.slots import DeviceKind
from tierstore.timeline import TimelineSink, Track
from tierstore.train.budgets import Budgets, adds_up, budgets
from tierstore.train.chunk_control import check_chunks
from tierstore.train.combinations import check_combination
from tierstore.train.config import TrainConfig, assignment_of
from tierstore.train.data import TextData, TrainingData
from tierstore.train.elastic import follow_ranks
from tierstore.train.files import DataConfig, DataFormat, text_files
from tierstore.train.footprint import FixedCost, fixed_cost, within_memory
from tierstore.train.ranks import Agreed, Opening, agree, check_alike
from tierstore.train.resharding import Resharded
from tierstore.train.stages import stage_config
from tierstore.train.state import check_records, conditions
from tierstore.train.task_data import TaskData
from tierstore.train.tasks import own_head_tasks
from tierstore.train.tokens.data import TokenData, open_data
from tierstore.train.tokens.making import tokenising_bytes
from tierstore.train.vocabulary import VocabularyTables, choose_vocabulary


class Loop(Enum):
    """The loop that drives a session. OWN: the trainer's, over ``config.data``. EXTERNAL: a caller's, with its own data,
    schedule and clipping; steps of experts are then always deferred, so that a step can be abandoned until its end.
    """

    OWN = "own"
    EXTERNAL = "external"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a session that exist before its store is opened.

    ``account``: what this rank's process will hold. ``timing``: when expert gradients become steps. ``data``: None if an
    external loop brings its own. ``conditions``: the settings that the bits of the run depend on. ``resharded_from``: how
    an elastic restart resharded the store, if so.
    """

    config: TrainConfig
    mesh: Mesh
    budgets: Budgets
    account: MemoryAccount
    timing: StepTiming
    data: TrainingData | None
    agreed: Agreed
    conditions: dict[str, object]
    vocabulary: VocabularyTables
    timeline: TimelineSink
    ledger: StallLedger
    resharded_from: Resharded | None

    @property
    def owned(self) -> range:
        """This rank's experts, of each layer."""
        return self.mesh.blocks(self.config.model.experts).owned(self.mesh.expert.rank)


def prepare(
    config: TrainConfig,
    opening: Opening,
    loop: Loop,
    mesh: Mesh | None,
    timeline: TimelineSink,
    progress: OnProgress,
) -> Setup:
    """Checks ``config``, agrees with the other ranks, and opens the data; ``progress`` is that of ``open_session``'s
    ``tokenising``. A collective. Raises what ``open_session`` raises.
    """
    device = rank_device(config.device, RankEnvironment()) if mesh is None else mesh.device
    make_current(device)
    mesh = mesh or Mesh.alone(RankEnvironment(), device)
    check_combination(config, mesh.layout)
    config.check_length()
    if config.data.batch_size % mesh.data.size and not config.tasks:
        raise ConfigError(
            f"data.batch_size: expected a multiple of the {mesh.data.size} ranks, got {config.data.batch_size}"
        )
    check_chunks(config, mesh)
    if loop is Loop.EXTERNAL:
        _refuse_external(config)
    _refuse_tasks(config, mesh.data.size)
    whole, config = config, stage_config(config, mesh.pipeline.rank, mesh.stages)
    if loop is Loop.EXTERNAL and mesh.stages > 1:
        raise ConfigError(
            "parallel.stages: expected 1: an external loop drives one pass after another, and stages interleave the passes "
            "of several micro-batches"
        )
    if config.threads:
        torch.set_num_threads(config.threads)
    compute_deterministically(device)
    owned = mesh.blocks(config.model.experts).owned(mesh.expert.rank)
    config.import_code()
    kind = DeviceKind.of(device.type)
    fixed = fixed_cost(
        config,
        resident_bytes(),
        ranks=mesh.data.size,
        device=kind,
        units=divided_units(config.spec, mesh.tensor.size),
        text=None if loop is Loop.OWN else 0,
        tokenising=_tokenising_bytes(config) if loop is Loop.OWN and mesh.world.rank == 0 else 0,
    )
    sums = adds_up(config, experts=config.model.experts, replicas=mesh.replicas, sharing=mesh.expert.size)
    config = within_memory(config, fixed, kind, sums=sums)
    divided = budgets(
        config,
        kind,
        experts=len(owned) * len(config.model.moe_layers),
        free=_free_device_bytes(config, mesh, fixed),
        sums=sums,
        external=loop is Loop.EXTERNAL,
    )
    resharded_from = follow_ranks(config, opening, mesh)
    agreed = agree(config.store, opening, mesh)
    recorded: dict[str, object] = {}  # of a store that is resumed: the conditions of its run so far
    if agreed.opening is Opening.RESUME:
        directory = rank_directory(config.store, mesh.world.rank, mesh.world.size)
        check_records(config, read_schemas(directory))
        raw = read_states(directory, STATE_KEY)[agreed.at]
        recorded = TrainState.unpack({STATE_KEY: raw}, where=str(directory)).conditions
    # A run resumes the schedule that it began with, unless the configuration names another.
    began = table_of(recorded.get("schedule", {}))
    model = whole.model
    schedule = config.schedule.over(config.steps, model.d_model, model.architecture.blocks, began)
    config = replace(config, schedule=schedule)
    vocabulary = choose_vocabulary(
        whole,
        ranks=mesh.data.size,
        device=kind,
        recorded=table_of(recorded.get("parallel", {})) if recorded else None,
    )
    # Last, because tokenising may take hours.
    data = _open_data(config, mesh, progress) if loop is Loop.OWN else None
    present = conditions(
        config,
        threads=torch.get_num_threads(),
        device=device,
        data_crc32=None if data is None else data.crc32,
        mesh=mesh,
        vocabulary=vocabulary,
    )
    check_alike(config, present, mesh)
    timeline.follow(mesh.device)
    return Setup(
        config=config,
        mesh=mesh,
        budgets=divided,
        account=fixed.account(config, kind),
        timing=config.step_timing if loop is Loop.OWN else StepTiming.DEFERRED,
        data=data,
        agreed=agreed,
        conditions=present,
        vocabulary=vocabulary,
        timeline=timeline,
        ledger=StallLedger(listener=stall_spans(timeline) if timeline.enabled else None),
        resharded_from=resharded_from,
    )


def _tokenising_bytes(config: TrainConfig) -> int:
    """What tokenising the data takes, one source after another, if they have documents."""
    if config.spec.tokenizer is None:
        return 0
    sources = [data for data in config.data_by_task.values() if data.format is not DataFormat.BYTES]
    return max((tokenising_bytes(config.store, text_files(data)) for data in sources), default=0)


def _free_device_bytes(config: TrainConfig, mesh: Mesh, fixed: FixedCost) -> int | None:
    """Bytes of this rank's accelerator that experts may take: what is free there beside a reserve, dense parameters,
    activations and whatever else the run keeps. None on a CPU.
    """
    if not has_own_memory(mesh.device):
        return None
    return usable_bytes(mesh.device) - fixed.device_bytes(config)


def _refuse_external(config: TrainConfig) -> None:
    if config.tasks:
        raise ConfigError("tasks: expected none: an external loop brings its own data")
    if config.data.layer_major:
        raise ConfigError(
            "data.micro_order: expected micro or auto: an external loop drives one pass after another, and layer order "
            "needs all micro-batches of a step at once"
        )


def _refuse_tasks(config: TrainConfig, ranks: int) -> None:
    if not config.tasks:
        return
    own, built_in = own_head_tasks(config.tasks), isinstance(config.model, ModelConfig)
    if own and not built_in:
        raise ConfigError(
            f"tasks.{own[0]}.head: expected shared: an imported model has one output head, in its own module"
        )
    if own and config.dense.optimizer_state is OptimizerState.NVME:
        raise ConfigError(
            f"tasks.{own[0]}.head: expected shared with dense.optimizer_state = nvme, which keeps one record a parameter "
            "group"
        )
    if not built_in and config.data.batch_size < ranks:
        raise ConfigError(
            f"data.batch_size: expected a row for each of the {ranks} data ranks: modules of an imported model take no "
            f"empty batch, got {config.data.batch_size}"
        )


def _open_data(config: TrainConfig, mesh: Mesh, progress: OnProgress) -> TrainingData:
    def open_source(data: DataConfig) -> TextData | TokenData:
        return open_data(
            data,
            seq_len=config.model.seq_len,
            vocab_size=config.model.vocab_size,
            tokenizer=config.spec.tokenizer,
            store=config.store,
            together=config.spec.mixes_documents,
            first=mesh.world.rank == 0,
            barrier=mesh.world.barrier,
            progress=progress,
        )

    if not config.tasks:
        return open_source(config.data)
    sources = {name: open_source(data) for name, data in config.data_by_task.items()}
    assignment = assignment_of(config, mesh.data.size)
    return TaskData(config.tasks, sources, assignment, micro_batches=config.data.micro_batches)


def compute_deterministically(device: torch.device) -> None:
    """Makes torch compute the same bits each time on ``device``, or raise. Call it before the first product there."""
    if has_own_memory(device):
        # Without it cuBLAS divides its workspace among streams as they arrive, and torch refuses every product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    set_deterministic(2)


def set_deterministic(mode: int) -> None:
    """``torch.use_deterministic_algorithms`` by ``torch.get_deterministic_debug_mode`` (0 no, 1 warn, 2 raise).

    Torch's own function imports the compiler to notify it, which adds a second to each start; here the compiler reads the
    environment variable, if it is imported later.
    """
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
    else:
        torch.set_deterministic_debug_mode(mode)
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(mode > 0))


def stall_spans(sink: TimelineSink) -> Callable[[StallKey, int, int], None]:
    """A listener of a stall ledger that adds each charged interval to the timeline's track of stalls."""

    def draw(key: StallKey, start_ns: int, end_ns: int) -> None:
        sink.add(
            Track.STALLS,
            key.cause.value,
            start_ns,
            end_ns,
            {"layer": key.layer, "dimension": key.tier.dimension.value, "tier": key.tier.value},
        )

    return draw
