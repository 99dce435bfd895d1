"""The example of docs/CACHE_LAB.md runs, and the page names what there is."""

import re
import runpy
import tomllib
from pathlib import Path

from tierstore.config import from_dict
from tierstore.lab.candidates import SIMPLEST_FIRST
from tierstore.train.config import TrainConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/CACHE_LAB.md").read_text()


def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples/tune_cache.py"))["main"]()
    out = capsys.readouterr().out
    assert "43416 requests for 2048 MiB" in out
    assert "better: misses" in out
    pasted = out[out.index("# for a cache") :]
    from_dict(TrainConfig, tomllib.loads(pasted))


def test_the_page_s_configuration_is_what_train_takes():
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    cache = from_dict(TrainConfig, tomllib.loads(text)).cache
    assert cache.half_life == 16


def test_the_page_lists_the_policies():
    assert ", ".join(SIMPLEST_FIRST) in " ".join(PAGE.split())
