"""The race of training with tiny sizes: rivals that need only torch train the same; the others are named with a reason."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import entrants
import pytest
import torch
import train_tierstore
import train_torch
import training_race
from entrants import Outcome, Rival, order
from fake_disk import FakeDisk
from process import RivalError, RivalProcess
from train_deepspeed import settings_of
from training import BuiltIn, Steps, TrainTask, disk_bytes, fill
from training_race import RIVALS, TrainingRace, difference, measurements

from tierstore.bench.harness import FigureTable, Progress
from tierstore.bench.probes import Bytes
from tierstore.bench.train_bound import Compulsory
from tierstore.errors import CapabilityError, ConfigError
from tierstore.model.config import ComputeDtype, ModelConfig
from tierstore.model.spec import spec_of
from tierstore.train.config import ScheduleConfig, TrainConfig
from tierstore.train.data import TextData
from tierstore.train.files import DataConfig

SIZES: dict[str, Any] = {"d_model": 16, "n_heads": 2, "n_layers": 2, "seq_len": 16, "d_ff": 32, "experts": 4}


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 40)
    return TrainConfig(
        store=tmp_path / "race",
        threads=1,
        host_budget=32 << 10,  # a few of the eight experts' records
        commit_every=0,
        schedule=ScheduleConfig(lr=1e-2, warmup_steps=1),
        data=DataConfig(paths=(str(text),), batch_size=2, validation_fraction=0.2),
        model=ModelConfig(**SIZES, top_k=1, activation="gelu"),
    )


# The workload -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"activation": "gelu", "top_k": 1},
        {"activation": "swiglu", "top_k": 2, "shared_expert_d_ff": 8, "moe_every": 2},
        {"compute_dtype": "bf16"},
    ],
)
def test_the_rivals_model_is_ours(config: TrainConfig, more: dict[str, Any]) -> None:
    from tierstore.moe import InMemoryExperts

    model = ModelConfig(**SIZES, **more)
    workload = BuiltIn(replace(config, model=model))
    module = workload.module()
    fill(module, workload.first_weights())
    assert sum(parameter.numel() for parameter in module.parameters()) == model.architecture.parameters
    experts = InMemoryExperts(
        model.expert_shape,
        layers=model.moe_layers,
        experts=model.experts,
        seed=model.seed,
        depth=model.n_layers,
        compute=model.compute_dtype.torch,
    )
    ours = spec_of(model).build(experts)
    batch = TextData(config.data, seq_len=model.seq_len).batch(0)
    expected = ours.run(batch)
    objective, loss = module(batch.tokens_BT, batch.targets_BT)
    assert expected.objective is not None
    wide = {} if model.compute_dtype is ComputeDtype.FP32 else {"rtol": 0.0, "atol": 1e-3}
    torch.testing.assert_close(objective, expected.objective, **wide)
    torch.testing.assert_close(loss, expected.loss, **wide)
    objective.backward()
    # Experts without a token have zeros for gradients: every parameter is stepped.
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"capacity_factor": 1.0},
        {"router_noise": "jitter", "router_noise_std": 0.1},
    ],
)
def test_what_the_rivals_cannot_do_is_refused(config: TrainConfig, changes: dict[str, Any]) -> None:
    changed = replace(config, model=ModelConfig(**SIZES, **changes))
    with pytest.raises(ConfigError, match=next(iter(changes))):
        TrainingRace(config=changed, store=changed.store).run(Progress())
    assert not changed.store.exists()


def test_deepspeed_is_told_to_train_the_same(config: TrainConfig, tmp_path: Path) -> None:
    over = tmp_path / "over.json"
    over.write_text(
        '{"zero_optimization": {"offload_param": {"buffer_count": 7}}, "aio": {"queue_depth": 8}}'
    )
    told = settings_of(task(config, tmp_path, rival="deepspeed-nvme", settings=over), "nvme", [512, 8])
    assert told["gradient_clipping"] == 0.0  # and not its default of 1
    assert told["optimizer"]["params"]["adam_w_mode"] is True
    zero = told["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "nvme"
    assert zero["offload_param"]["buffer_size"] == 512
    assert (zero["offload_param"]["buffer_count"], told["aio"]["queue_depth"]) == (7, 8)
    assert told["aio"]["block_size"] == 1 << 20


def task(config: TrainConfig, directory: Path, **more: Any) -> TrainTask:
    directory.mkdir(exist_ok=True)
    given = {"rival": "torch", "module": "train_torch", **more}
    return TrainTask(config=config, directory=directory, **given)


# A whole race -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_race_of_rivals_that_need_torch_alone(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    names = ("torch", "fsdp2-cpu", "tierstore", "deepspeed-nvme")
    missing = {**RIVALS, "deepspeed-nvme": replace(RIVALS["deepspeed-nvme"], needs="no_such")}
    monkeypatch.setattr(training_race, "RIVALS", MappingProxyType(missing))
    monkeypatch.setattr(training_race, "StepDisk", FakeDisk)
    progress = Progress()
    monkeypatch.setattr(progress, "say", said.append)
    race = TrainingRace(
        rivals=names, steps=1, warmup=3, rounds=2, config=replace(config, clip_norm=0.5), store=config.store
    )
    made = race.run(progress)
    found = made.figures
    assert not config.store.exists()
    by_name = {one["rival"]: one for one in found["rivals"]}
    assert [one["outcome"] for one in found["rivals"]] == ["ran"] * 3 + ["skipped"], said
    assert by_name["deepspeed-nvme"]["reason"] == "no_such is not installed (pip install tierstore[rivals])"
    assert any("no_such is not installed" in line for line in said)
    assert not made.failed
    assert found["reference"] == "torch"
    for name in names[:3]:
        losses = by_name[name]["losses"]
        assert len(losses) == 5
        assert losses == pytest.approx(by_name["torch"]["losses"], abs=1e-4)
    # Had one of them stood still, its loss would show it.
    assert by_name["torch"]["losses"][-1] < by_name["torch"]["losses"][0] - 0.1
    assert found["orders"] == [list(names[:3]), [*names[1:3], names[0]]]
    assert {one["rival"] for one in found["against"]} == {"torch", "fsdp2-cpu"}
    document = json.loads(json.dumps(found))
    assert len(document["rivals"][0]["times"]["step_samples_s"]) == 2
    assert "times" not in document["rivals"][3]
    labels = {one.label for one in measurements(found)}
    assert {"tokens (rival=torch)", "read a step (rival=tierstore)"} <= labels
    assert not any("deepspeed" in label for label in labels)


def test_tierstore_in_ram_trains_the_same(config: TrainConfig, tmp_path: Path) -> None:
    losses = []
    for module, name in ((train_torch, "torch"), (train_tierstore, "tierstore-ram")):
        with module.opened(task(config, tmp_path / name, rival=name)) as (description, step):
            losses.append([step() for _ in range(3)])
            assert description
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_tierstore_takes_the_order_that_its_command_would(config: TrainConfig, tmp_path: Path) -> None:
    """With ``micro_order = auto`` and a disk on which bytes count; in RAM nothing is moved, and nothing is gained."""
    data = replace(config.data, micro_batches=2)
    slow = replace(config.links, disk=replace(config.links.disk, bandwidth=1 << 20))
    auto = replace(config, data=data, links=slow, host_budget=100_000)
    for name, taken in (("tierstore", "micro-batches: layer ("), ("tierstore-ram", "micro-batches: micro (")):
        with train_tierstore.opened(task(auto, tmp_path / name, rival=name)) as (description, _):
            assert taken in " ".join(description)


def test_the_bound_and_the_aim(
    config: TrainConfig, fake: type[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 3 MB of compulsory bytes at 1 MB/s: 3 s, more than the 2.5 s in RAM; DeepSpeed's step takes 8 s.
    monkeypatch.setattr(training_race, "StepDisk", FakeDisk)
    moved = Bytes(12_000_000, 6_000_000)
    least = Compulsory("lru", moved, {"lru": moved}, moved)
    monkeypatch.setattr(training_race, "compulsory", lambda trace, first_step, steps: least)
    fake.behaviour |= {"tierstore": "moves bytes"}
    found = raced(config, rivals=("deepspeed-nvme", "tierstore", "tierstore-ram"))
    bound = found["bound"]
    assert (bound["compulsory_step_read_bytes"], bound["compulsory_step_written_bytes"]) == (
        2_000_000,
        1_000_000,
    )
    assert bound["in_ram_step_s"] == 2.5
    assert bound["bound_s"] == 3.0
    assert bound["step_to_bound_ratio"] == pytest.approx(2 / 3)
    assert bound["aim_s"] == pytest.approx(3.3)  # more than 8 s / 4
    assert bound["round_step_to_aim_ratio"] == pytest.approx([2 / 3.3] * 3)
    targets = {one.label: one.met for one in measurements(found) if one.target is not None}
    assert targets == {"resident to rival's (rival=deepspeed-nvme)": True, "step to aim": True}


# Fake rivals -------------------------------------------------------------------------------------------------


class FakeProcess:
    """A rival that answers at once, as ``behaviour`` has it for its name, and logs its turns."""

    behaviour: dict[str, str]
    log: list[str]

    def __init__(self, name: str, *given: Any, data_bytes: int = 0, **more: Any) -> None:
        self.name, self._number = name, 0
        self._how = self.behaviour.get(name, "")
        if self._how == "does not open" or (self._how == "too large" and data_bytes):
            raise RivalError(f"{name}: was killed by signal 9")
        self.description, self.open_s = [name], 0.5

    def ask(self, steps: int) -> Steps:
        self.log.append(self.name)
        if self._how == "dies" and self._number >= 3:
            raise RivalError(f"{self.name}: ValueError: no more")
        losses = [1.0 / (self._number + i + 1) for i in range(steps)]
        if self._how == "trains something else":
            losses = [loss + 0.01 * (self._number + i) for i, loss in enumerate(losses)]
        self._number += steps
        return Steps(
            step_s=[{"torch": 1.0, "tierstore": 2.0, "tierstore-ram": 2.5}.get(self.name, 8.0)] * steps,
            losses=losses,
            cpu_s=2.0 * steps,
            peak_resident_bytes=1000 if self.name == "tierstore" else 4000,
            read_bytes=1000 if self._how == "moves bytes" else 0,
            written_bytes=0,
            disk_read_bytes=None if self.name == "torch" else 7,
            disk_written_bytes=None if self.name == "torch" else 5,
        )

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeProcess]:
    kind = type("Fake", (FakeProcess,), {"behaviour": {}, "log": []})
    monkeypatch.setattr(training_race, "RivalProcess", kind)
    everyone = {name: Rival(rival.title, rival.module) for name, rival in RIVALS.items()}
    monkeypatch.setattr(training_race, "RIVALS", MappingProxyType(everyone))
    return kind


def raced(config: TrainConfig, **options: Any) -> dict[str, Any]:
    """The figures; whether the race failed is ``failed``."""
    race = TrainingRace(steps=2, warmup=1, rounds=3, config=config, store=config.store, **options)
    made = race.run(Progress())
    assert all(shown.cells for shown in made.shown if isinstance(shown, FigureTable) and shown.rows)
    return {**made.figures, "failed": made.failed}


def test_each_round_begins_with_another_one() -> None:
    assert [order("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert order([], 1) == []


def test_rivals_take_turns(config: TrainConfig, fake: type[FakeProcess]) -> None:
    names = ("torch", "deepspeed-nvme", "tierstore")
    found = raced(config, rivals=names)
    warm, rounds = fake.log[:3], fake.log[3:]
    assert warm == list(names)
    assert rounds == [*itertools.chain(*found["orders"])]
    assert [first[0] for first in found["orders"]] == list(names)
    against = {one["rival"]: one for one in found["against"]}
    assert against["deepspeed-nvme"]["tokens_ratio"] == 4.0
    assert against["torch"]["tokens_ratio"] == 0.5
    assert against["deepspeed-nvme"]["resident_ratio"] == 0.25
    disk = {one["rival"]: one["times"]["disk_step_read_bytes"] for one in found["rivals"]}
    assert disk == {"torch": None, "deepspeed-nvme": 3, "tierstore": 3}


def test_one_that_dies_or_does_not_open_leaves_the_others_racing(
    config: TrainConfig, fake: type[FakeProcess]
) -> None:
    fake.behaviour |= {"torch": "does not open", "deepspeed-cpu": "dies"}
    found = raced(config, rivals=("torch", "deepspeed-cpu", "fsdp2-cpu", "tierstore"))
    by_name = {one["rival"]: one for one in found["rivals"]}
    assert by_name["torch"]["outcome"] == "skipped"
    assert by_name["torch"]["reason"] == "torch: was killed by signal 9"
    assert by_name["deepspeed-cpu"]["outcome"] == "died"
    assert by_name["deepspeed-cpu"]["reason"] == "round 2: deepspeed-cpu: ValueError: no more"
    assert found["reference"] == "tierstore"
    assert [one["rival"] for one in found["against"]] == ["fsdp2-cpu"]
    assert found["orders"][2] == ["fsdp2-cpu", "tierstore"]
    assert not found["failed"]


def test_one_that_trains_something_else_is_no_rival(config: TrainConfig, fake: type[FakeProcess]) -> None:
    fake.behaviour |= {"deepspeed-nvme": "trains something else"}
    found = raced(config, rivals=("torch", "deepspeed-nvme", "tierstore"))
    assert found["failed"]
    told = found["rivals"][1]
    assert told["outcome"] == Outcome.DISAGREED.value
    assert told["loss_difference"] == pytest.approx(0.06)
    assert "0.06 nats from those of torch" in str(told["reason"])
    assert [one["rival"] for one in found["against"]] == ["torch"]
    assert not any("deepspeed" in one.label for one in measurements(found))


def test_one_too_large_for_the_limit_races_without(
    config: TrainConfig, fake: type[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(limit: int, *, name: str) -> None:
        raise CapabilityError("no")

    monkeypatch.setattr(entrants, "MemoryLimit", refused)
    fake.behaviour |= {"deepspeed-nvme": "too large"}
    found = raced(config, rivals=("deepspeed-nvme", "tierstore"), memory_limit=1 << 30)
    memory = {one["rival"]: one["memory"] for one in found["rivals"]}
    assert memory["tierstore"] == "RLIMIT_DATA"
    assert memory["deepspeed-nvme"].startswith(
        "no limit: not in the RLIMIT_DATA's (deepspeed-nvme: was killed"
    )
    assert all(one["outcome"] == "ran" for one in found["rivals"])


def test_differences_of_losses() -> None:
    assert difference([1.0, 2.0], [1.0, 2.5, 9.0]) == 0.5
    assert difference([1.0], [math.nan]) == math.inf
    assert difference([], []) == math.inf
    drifted = [1.0] * training_race.COMPARED_STEPS + [5.0]
    assert difference([1.0] * len(drifted), drifted) == 0.0


# Processes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_reasons_of_a_process(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = replace(config, data=DataConfig(paths=(str(tmp_path / "nowhere"),)))
    with pytest.raises(RivalError, match=r"torch: DataError: .*nowhere"):
        RivalProcess("torch", task(lost, tmp_path), tmp_path / "lost", timeout_s=60)
    with pytest.raises(RivalError, match=r"torch: no answer within 0\.001 s"):
        RivalProcess("torch", task(config, tmp_path), tmp_path / "late", timeout_s=0.001)
    (tmp_path / "rival_that_ends.py").write_text(
        "import os\ndef opened(task):\n    print('begun\\nthe end\\n', flush=True)\n    os._exit(7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    ends = task(config, tmp_path, module="rival_that_ends")
    with pytest.raises(RivalError, match=r"torch: exited with status 7; its last line: the end$"):
        RivalProcess("torch", ends, tmp_path / "dead", timeout_s=60)


def test_bytes_of_a_disk(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    entry = tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}"
    assert disk_bytes(tmp_path, tmp_path) is None
    entry.mkdir(parents=True)
    (entry / "stat").write_text("  1 0 8 2   3 0 16 4 0 5 6\n")
    assert disk_bytes(tmp_path, tmp_path) == (4096, 8192)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"rivals": ("other",)}, "expected one of torch, "),
        ({"rivals": ("torch", "torch")}, "each once"),
        ({"rounds": 0}, "rounds"),
        ({"memory_limit": -1}, "memory_limit"),
    ],
)
def test_races_that_make_no_sense(config: TrainConfig, bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TrainingRace(**bad, config=config, store=config.store).run(Progress())
    assert not config.store.exists()
