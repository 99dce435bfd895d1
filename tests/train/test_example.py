"""The example of the built-in trainer runs as it says."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_larger_than_memory.py"


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE))
    example["main"](tmp_path)
    said = capsys.readouterr().out
    assert said.endswith("the same bits\n")
    steps = re.findall(r"step \d+: loss .*", said)
    count = example["STEPS"]
    assert len(steps) == 2 * count
    assert steps[:count] == steps[count:]
    # 128 experts of 3 matrices of 96 x 192, as weights and two moments in fp32, and dense records.
    assert 128 * 3 * 96 * 192 * 12 / 2**20 < float(re.findall(r"(\S+) MiB of records in 3MiB", said)[0]) < 84
    misses = [int(count) for count in re.findall(r"(\d+) misses", said)]
    assert min(misses[:2]) > 0 == misses[2]
