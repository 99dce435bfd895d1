"""The stages one after another, with stages that only count: what is run, found, made again, stopped."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tierstore.deploy.pipeline import MARKER, DeployStage, deploy, stage_records
from tierstore.deploy.records import (
    CompressionConfig,
    DeployConfig,
    DeployInterrupted,
    Deployment,
    DistillationConfig,
    Method,
    StageContext,
    StageName,
    StageOutput,
    stage_directory,
)
from tierstore.errors import ChecksumError, ConfigError, StoreExistsError, StoreFormatError, StoreMissingError
from tierstore.stats import OnProgress


class _Counting:
    """Writes a line more each time it runs; verifies that nobody else did."""

    def __init__(self, name: StageName, log: list[str]) -> None:
        self.name = name
        self._log = log

    def settings(self, config: DeployConfig) -> Mapping[str, object]:
        return {"threads": config.threads} if self.name is StageName.DISTILLATION else {}

    def run(self, context: StageContext) -> StageOutput:
        self._log.append(f"run {self.name.value}")
        store = context.directory / "store"
        store.mkdir(exist_ok=True)
        lines = (store / "lines").read_text() if (store / "lines").exists() else ""
        (store / "lines").write_text(lines + "x")
        context.check()
        return StageOutput(
            store=store, checks={"lines": len(lines) + 1}, figures={"settings": {"threads": 1}}
        )

    def verify(self, store: Path, checks: Mapping[str, object], progress: OnProgress) -> None:
        self._log.append(f"verify {self.name.value}")
        if len((store / "lines").read_text()) != checks["lines"]:
            raise ChecksumError(f"{store}: lines")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def stages(log: list[str]) -> list[DeployStage]:
    counting = [_Counting(name, log) for name in StageName]
    return [
        DeployStage(name=each.name, settings=each.settings, run=each.run, verify=each.verify)
        for each in counting
    ]


@pytest.fixture
def config(tmp_path: Path) -> DeployConfig:
    return DeployConfig(store=tmp_path / "store", target=tmp_path / "out")


def _run(log: list[str]) -> list[StageName]:
    """The stages that ran."""
    return [StageName(line.removeprefix("run ")) for line in log if line.startswith("run ")]


def test_all_stages_make_the_target(config: DeployConfig, stages: list[DeployStage], log: list[str]) -> None:
    done = deploy(config, stages=stages)
    assert done.complete
    assert done.directory == config.target
    assert (config.target / "lines").read_text() == "x"
    assert not config.target.with_name("out.partial").exists()
    assert [record.stage for record in stage_records(config.target)] == list(StageName)
    deployment = Deployment.read(config.target)
    assert deployment.settings == {"threads": 1}
    between = [f"{what} {name.value}" for name in StageName for what in ("run", "verify")]
    assert log == between[:-1]  # each stage is verified before the next one runs


def test_the_same_again_finds_it_and_others_are_refused(
    config: DeployConfig, stages: list[DeployStage], log: list[str]
) -> None:
    deploy(config, stages=stages)
    log.clear()
    again = deploy(config, stages=stages)
    assert [record.stage for record in again.records] == list(StageName)
    assert log == []
    with pytest.raises(StoreExistsError, match="something here already"):
        deploy(replace(config, threads=7), stages=stages)


def test_a_run_killed_while_it_removes_the_stages_leaves_them_to_the_next(
    config: DeployConfig, stages: list[DeployStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []

    def killed(path: Path) -> None:
        removed.append(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            deploy(config, stages=stages)
    root = config.target.with_name("out.partial")
    assert removed[0].parent == root  # not the directory itself, in which the marker is
    assert (root / MARKER).exists()
    assert deploy(config, stages=stages).complete
    assert not root.exists()


def test_it_goes_on_behind_the_stage_where_it_ended(
    config: DeployConfig, stages: list[DeployStage], log: list[str]
) -> None:
    first = deploy(config, until=StageName.CONVERSION, stages=stages)
    assert not first.complete
    assert len(stage_records(config.target)) == 3
    log.clear()
    assert deploy(config, stages=stages).complete
    assert log[:4] == [f"verify {name.value}" for name in list(StageName)[:3]] + ["run segmentation"]
    assert _run(log) == list(StageName)[3:]


def test_other_settings_make_a_stage_and_all_behind_it_again(
    config: DeployConfig, stages: list[DeployStage], log: list[str]
) -> None:
    deploy(config, until=StageName.OPTIMISATION, stages=stages)
    log.clear()
    other = replace(config, threads=7)
    deploy(other, until=StageName.OPTIMISATION, stages=stages)
    assert _run(log) == list(StageName)[1:5]
    root = config.target.with_name("out.partial")
    assert (stage_directory(root, StageName.DISTILLATION) / "store" / "lines").read_text() == "x"


def test_a_damaged_output_is_found_by_the_next_run(config: DeployConfig, stages: list[DeployStage]) -> None:
    deploy(config, until=StageName.FUSION, stages=stages)
    (
        stage_directory(config.target.with_name("out.partial"), StageName.FUSION) / "store" / "lines"
    ).write_text("xx")
    with pytest.raises(ChecksumError, match="lines"):
        deploy(config, stages=stages)


def test_what_is_stopped_in_a_stage_goes_on_in_it(config: DeployConfig, stages: list[DeployStage]) -> None:
    asked = iter([False, False, False, True])
    with pytest.raises(DeployInterrupted, match="in stage distillation"):
        deploy(config, stages=stages, asked_to_stop=lambda: next(asked))
    deploy(config, until=StageName.DISTILLATION, stages=stages)
    store = stage_directory(config.target.with_name("out.partial"), StageName.DISTILLATION) / "store"
    assert (store / "lines").read_text() == "xx"  # what it had begun was there


def test_a_directory_of_somebody_else_is_left_alone(config: DeployConfig, stages: list[DeployStage]) -> None:
    other = config.target.with_name("out.partial")
    other.mkdir()
    (other / "mine").touch()
    with pytest.raises(FileExistsError, match="but it exists and is not theirs"):
        deploy(config, stages=stages)
    with pytest.raises(StoreMissingError, match="no deployment found"):
        stage_records(config.target)
    assert [path.name for path in other.iterdir()] == ["mine"]


def test_damaged_records_are_named(config: DeployConfig, stages: list[DeployStage]) -> None:
    deploy(config, until=StageName.FUSION, stages=stages)
    path = stage_directory(config.target.with_name("out.partial"), StageName.FUSION) / "stage.json"
    path.write_text("{}")
    with pytest.raises(StoreFormatError, match=r"stage.json: not a stage's record"):
        stage_records(config.target)
    path.write_text(json.dumps({"version": 9}))
    with pytest.raises(StoreFormatError, match="version 9, expected 1"):
        stage_records(config.target)


def test_fewer_experts_need_a_text() -> None:
    with pytest.raises(ConfigError, match="--text"):
        DeployConfig(store=Path("s"), target=Path("t"), compression=CompressionConfig(experts=2))


@pytest.mark.parametrize("name", ["minutes", "steps", "rate", "rows", "length"])
def test_options_of_what_is_not_done_are_refused(name: str) -> None:
    how = DistillationConfig(**{name: 7})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--{name}: has effect with --(experts|text) only"):
        DeployConfig(store=Path("s"), target=Path("t"), distillation=how)


def test_a_method_needs_a_number_of_experts() -> None:
    with pytest.raises(ConfigError, match="--method: has effect with --experts only"):
        DeployConfig(store=Path("s"), target=Path("t"), compression=CompressionConfig(method=Method.PRUNE))
