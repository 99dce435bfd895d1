"""Generation in turns: the load by hand with a fake clock, the GGUF file read back, and turns of real processes."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from generating import Generated, Load, Workload, serve_load
from generation_race import Turn, speed_figures, speed_ratios
from raced_model import drop_page_cache, read_ahead_bytes, read_ahead_of, vocabulary_of, write_gguf
from served_stores import store_of

from tierstore.errors import CapabilityError, ConfigError


def workload(batch: int = 2) -> Workload:
    return Workload(batch=batch, prompt_tokens=4, new_tokens=3, vocabulary=50)


def test_tokens_are_forced_and_the_same_for_all() -> None:
    asked = workload()
    assert asked.prompts() == workload().prompts()
    assert [len(prompt) for prompt in asked.prompts()] == [4, 4]
    assert [len(step) for step in asked.forced()] == [2, 2, 2]
    assert all(3 <= token < 50 for row in (*asked.prompts(), *asked.forced()) for token in row)
    assert vocabulary_of({"text_config": {"vocab_size": 7}}) == 7
    with pytest.raises(ConfigError, match="vocab_size"):
        vocabulary_of({})


# Figures ----------------------------------------------------------------------------------------------------


def turn(prefill_s: float, step_s: float, chosen: int = 9) -> Turn:
    made = Generated(
        prefill_s=prefill_s,
        step_s=[step_s] * 3,
        prefill_read_bytes=800,
        decode_read_bytes=600,
        chosen=[[chosen, 1]] * 4,
        tiers={
            "nvme_read": 60,
            "speculated": 6,
            "useful_speculated": 0,
            "late_prefetch": 0,
            "hits": 3,
            "misses": 1,
        },
        cpu_s=1.0,
        peak_resident_bytes=10,
    )
    return Turn(generated=made, open_s=1.0, peak_group_bytes=20)


def test_figures_by_hand() -> None:
    asked, ours, theirs = workload(), [turn(2.0, 0.5), turn(4.0, 1.0)], [turn(8.0, 2.0, chosen=8)] * 2
    made = speed_figures(asked, ours, theirs)
    assert made["round_prefill_tokens_per_s"] == [4.0, 2.0]  # eight tokens
    assert made["round_decode_tokens_per_s"] == [4.0, 2.0]  # two a step
    assert (made["prefill_token_read_bytes"], made["decode_token_read_bytes"]) == (100, 100)
    assert (made["tier_token_nvme_read_bytes"], made["tier_token_speculated_bytes"]) == (10, 1)
    assert made["hit_ratio"] == 0.75
    assert made["chosen_same_ratio"] == 0.5
    against = speed_ratios(asked, ours, "other", theirs)
    assert against["round_decode_ratio"] == [4.0, 2.0]
    assert against["decode_ratio"] == 3.0
    assert against["peak_group_ratio"] == 1.0


# Load -------------------------------------------------------------------------------------------------------


class FakeRunner:
    """A prefill takes two seconds, a step one."""

    def __init__(self) -> None:
        self.now = 0.0
        self.most = 0
        self._joined = 0
        self._running: set[int] = set()

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(self._running)

    def join(self, prompts: Sequence[Sequence[int]]) -> dict[int, torch.Tensor]:
        self.now += 2.0
        first, self._joined = self._joined, self._joined + len(prompts)
        self._running.update(range(first, self._joined))
        self.most = max(self.most, len(self._running))
        return {number: torch.zeros(1) for number in range(first, self._joined)}

    def resume(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, torch.Tensor]:
        raise AssertionError("no pass fails")

    def step(self, tokens: Mapping[int, int]) -> dict[int, torch.Tensor]:
        assert set(tokens) == self._running
        self.now += 1.0
        return {number: torch.zeros(1) for number in tokens}

    def leave(self, number: int) -> None:
        self._running.remove(number)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_latencies_begin_with_the_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner()
    asked = Workload(batch=3, prompt_tokens=2, new_tokens=2, vocabulary=9)
    load = Load(requests=asked, requests_per_s=1.0, sequences=2)
    monkeypatch.setattr(Load, "arrivals", lambda self: [1.0, 1.5, 2.0])
    found = serve_load(runner, load, clock=lambda: runner.now, sleep=runner.sleep)
    # The first joins at 1 and has its token at 3; the second joins then, until 5; two steps end at 7 for both. The first
    # has waited through the second's prefill. The third finds room at 7: its token comes at 9, its last at 11.
    assert found.first_token_s == [2.0, 3.5, 7.0]
    assert found.between_tokens_s == [3.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert found.complete_s == [6.0, 5.5, 9.0]
    assert found.elapsed_s == 11.0
    assert (runner.most, runner.numbers) == (2, ())


def test_arrivals_are_a_poisson_process() -> None:
    asked = Workload(batch=4000, prompt_tokens=1, new_tokens=1, vocabulary=9)
    load = Load(requests=asked, requests_per_s=8.0, sequences=1)
    gaps = np.diff([0.0, *load.arrivals()])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as of an exponential distribution


# The page cache ---------------------------------------------------------------------------------------------


def test_what_may_not_be_dropped_is_said(tmp_path: Path) -> None:
    assert drop_page_cache(tmp_path / "absent" / "drop_caches") is not None
    assert drop_page_cache(tmp_path / "drop_caches") is None
    assert (tmp_path / "drop_caches").read_text() == "3\n"


def test_readahead_is_set_and_put_back(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    queue = tmp_path / f"sys/dev/block/{os.major(number)}:{os.minor(number)}/queue/read_ahead_kb"
    queue.parent.mkdir(parents=True)
    queue.write_text("8192\n")
    with read_ahead_of(tmp_path, 128 << 10, tmp_path / "sys"):
        assert read_ahead_bytes(tmp_path, tmp_path / "sys") == 128 << 10
    assert read_ahead_bytes(tmp_path, tmp_path / "sys") == 8 << 20
    with pytest.raises(CapabilityError, match="no such setting"), read_ahead_of(tmp_path, 1, tmp_path):
        pass


# Files and processes ----------------------------------------------------------------------------------------


def test_the_gguf_file_has_the_checkpoints_weights(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    plain, _ = store_of(tmp_path, "qwen3_moe", torch.bfloat16)
    write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    read = {one.name: one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    mlp = plain.model.layers[1].mlp.experts
    down = read["blk.1.ffn_down_exps.weight"].data.view(np.uint16)
    assert np.array_equal(down, mlp.down_proj.detach().view(torch.uint16).numpy())
    norm = read["output_norm.weight"].data
    assert np.array_equal(norm, plain.model.norm.weight.detach().float().numpy())
    store_of(tmp_path / "other", "mixtral")
    with pytest.raises(ConfigError, match="qwen3_moe"):
        write_gguf(tmp_path / "other/model", tmp_path / "other.gguf")
