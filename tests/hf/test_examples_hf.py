"""The examples of own loops run as they say; in this process, because transformers takes seconds to import."""

import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_families import make_config, plain_model

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("examples") / "model"
    plain_model(make_config("mixtral")).save_pretrained(directory)
    return directory


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example with arguments; returns the lines that it printed."""

    def call(name: str, *arguments: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers', accelerate's
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return call


@pytest.mark.parametrize("name", ["own_loop.py", "trainer.py", "accelerated.py", "lora.py", "plain_moe.py"])
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 50


def test_own_loop(run: Run, model: Path, tmp_path: Path) -> None:
    said = run("own_loop.py", model, tmp_path / "store")
    losses = [float(line.split()[1].rstrip(",")) for line in said[:-1]]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert said[-1].startswith("committed at step 8; after [0, 1, 2, 3, 4, 5, 6, 7]: [")


def test_trainer_resumes_where_the_store_stands(run: Run, model: Path, tmp_path: Path) -> None:
    """And the same bits come out as without the interruption."""
    (whole,) = (
        line for line in run("trainer.py", model, tmp_path / "a", tmp_path / "out-a", 4) if "losses" in line
    )
    run("trainer.py", model, tmp_path / "b", tmp_path / "out-b", 2)
    (resumed,) = (
        line
        for line in run("trainer.py", model, tmp_path / "b", tmp_path / "out-b", 4, "resume")
        if "losses" in line
    )
    assert resumed == whole
    assert whole.startswith("step 4, losses [")
    saved = sorted(path.name for path in (tmp_path / "out-b" / "checkpoint-4").iterdir())
    assert "config.json" not in saved  # nobody takes it for a model
    from tierstore.hf import StepError

    with pytest.raises(StepError, match="the checkpoint is of another store"):
        run("trainer.py", model, tmp_path / "a", tmp_path / "out-b", 6, "resume")


def test_accelerate(run: Run, model: Path, tmp_path: Path) -> None:
    said = run("accelerated.py", model, tmp_path / "store", tmp_path / "checkpoint")
    assert said[-1] == "step 8, learning rate 3.00e-04"
    assert float(said[-2].split()[1]) < float(said[0].split()[1])


def test_lora(run: Run, model: Path, tmp_path: Path) -> None:
    said = run("lora.py", model, tmp_path / "store", tmp_path / "adapter")
    assert said[0].startswith("8 parameters are trained: model.layers.0.self_attn.q_proj.lora_A")
    losses = [float(line.split()[1]) for line in said[1:-1]]
    assert sum(losses[-4:]) < sum(losses[:4])
    assert "adapter_model.safetensors" in said[-1]


def test_plain_moe(run: Run, tmp_path: Path) -> None:
    said = run("plain_moe.py", tmp_path / "store")
    assert said[-1].startswith("32 experts in commit 2 of ")
    assert float(said[-2].split()[-1]) < 0.1 * float(said[0].split()[-1])
