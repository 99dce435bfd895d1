"""``tierstore plan --model``: every use of a model that comes with a config.json."""

import json
from pathlib import Path

import pytest
from command_line import planned

_CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 8,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
_EXPERT, _RECORDS = 3 * 32 * 16, 16
_ROOMY = ("--memory", "4GiB", "--disk", "100GB", "--set", "finetune.seq_len=32")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    return tmp_path


def test_every_use_of_a_model(model: Path) -> None:
    """With the least memory for experts, so that each pass reads what it needs."""
    status, found, shown = planned("--model", model, *_ROOMY, "--lora", "4")
    assert status == 0
    assert (found["use"], found["model"]["model_type"]) == ("full", "qwen3_moe")
    assert found["sparse_parameters_count"] == _EXPERT * _RECORDS
    assert found["parameters"] == found["dense_parameters_count"] + _EXPERT * _RECORDS
    uses = {use["use"]: use for use in found["uses"]}
    assert list(uses) == ["full", "lora", "lora-attention", "serve"]
    for use in uses.values():
        assert use["fits"]
        assert use["step"]["step_s"] > 0
    assert uses["serve"]["token"]["tokens_per_s"] > 0
    assert found["frozen_experts_bytes"] == 4096 * _RECORDS  # 3,072 bytes each, padded
    # A pair: 4 x 32 and 32 x 4 beside gate and up, 4 x 16 and 32 x 4 beside down.
    pairs = found["pairs"]
    assert pairs["expert_parameters_count"] == (4 * 32 + 32 * 4 + 4 * 16 + 32 * 4) * _RECORDS
    # Queries and output 32 x 32, keys and values 16 x 32, in two layers.
    assert pairs["attention_parameters_count"] == 2 * 4 * (2 * 64 + 2 * 48)
    assert pairs["fits_in_memory"] is True
    assert "pairs fit in memory: yes" in shown
    assert "frozen experts: 64 KiB on disk, one copy" in shown


def test_a_manifest_of_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "config.json").write_text(json.dumps(_CONFIG))
    for name in ("manifest.json", "q/manifest.json"):
        (tmp_path / name).write_text("[]")
    status, found, _ = planned("--model", tmp_path / "q", *_ROOMY)
    assert (status, found["model"]["model_type"]) == (0, "qwen3_moe")


def test_what_is_frozen_is_read_and_never_written(model: Path) -> None:
    budget = ["--host-budget", "56KiB", "--set", "prefetch.depth=0"]
    _, found, _ = planned("--model", model, *_ROOMY, *budget, "--lora", "4")
    uses = {use["use"]: use["step"] for use in found["uses"]}
    assert uses["full"]["written_bytes"] > 0
    assert uses["lora"]["written_bytes"] > 0
    for name in ("lora-attention", "serve"):
        assert uses[name]["written_bytes"] == 0
    assert 0 < uses["serve"]["read_bytes"] <= 4096 * _RECORDS
    assert uses["serve"]["read_bytes"] <= uses["lora-attention"]["read_bytes"] <= 2 * 4096 * _RECORDS
    assert uses["lora-attention"]["read_bytes"] < uses["lora"]["read_bytes"]


def test_a_step_that_hides_the_disk_is_proposed(model: Path) -> None:
    """Of one sequence of 32 tokens a micro-batch."""
    few = ("--host-budget", "56KiB", "--set", "prefetch.depth=0", "--set", "links.disk.bandwidth=10000000")
    _, found, shown = planned("--model", model, *_ROOMY, *few)
    proposed = found["proposed_step"]
    count = proposed["micro_batches_count"]
    assert proposed["tokens"] == 32 * count > 32
    assert proposed["tokens_per_s"] > 2 * found["prediction"]["tokens_per_s"]
    assert f"from {32 * count:,} tokens a step on (data.micro_batches = {count} in layer order)" in shown
    _, found, shown = planned("--model", model, *_ROOMY, "--host-budget", "100MiB")
    assert found["proposed_step"] is None
    assert "tokens a step on" not in shown


@pytest.mark.parametrize("use", ["lora", "lora-attention", "serve"])
def test_a_use_in_detail(model: Path, use: str) -> None:
    status, found, shown = planned("--model", model / "config.json", *_ROOMY, "--for", use)
    assert (status, found["use"]) == (0, use)
    one = next(row for row in found["uses"] if row["use"] == use)
    totals = found["totals"]
    assert one["disk_bytes"] == totals["nvme_bytes"]
    assert one["memory_bytes"] == totals["device_bytes"] + totals["host_bytes"]
    assert one["step"]["read_bytes"] == found["prediction"]["read_bytes"]
    names = {term["name"] for term in found["terms"]}
    assert ("pair extents" in names) == (use == "lora")
    assert ("keys and values" in names) == (use == "serve")
    extents = next(term for term in found["terms"] if term["name"] == "expert extents")
    assert extents["term_bytes"] == 4096 * _RECORDS
    assert f"details of the use {use}:" in shown


def test_pairs_that_memory_cannot_hold(model: Path) -> None:
    _, roomy, _ = planned("--model", model, *_ROOMY, "--for", "lora")
    lora = next(use for use in roomy["uses"] if use["use"] == "lora")
    limit = lora["memory_bytes"] - roomy["host_budget_bytes"] + lora["least_host_budget_bytes"]
    room = (*_ROOMY[2:], "--host-budget", lora["least_host_budget_bytes"])
    status, found, shown = planned("--model", model, *room, "--memory", str(limit), "--for", "lora")
    assert (status, found["pairs"]["fits_in_memory"]) == (0, False)
    assert "pairs fit in memory: no" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "mixtral-8x7b", "--model", "x"], "--preset and --model cannot be combined"),
        (["--for", "lora"], "expected an imported model"),
        (["--model", "nowhere"], "missing; expected a model directory or its config.json"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    status, _, shown = planned(*arguments)
    assert status == 2
    assert message in shown


def test_sequences_beyond_the_positions_are_refused(model: Path) -> None:
    for more in ([], ["--ranks", "2", "--layouts"]):
        length = ["--set", "finetune.seq_len=129"]
        status, _, shown = planned("--model", model, *_ROOMY[:4], *length, *more)
        assert status == 2
        assert "finetune.seq_len: expected at most 128, the positions of the model, got 129" in shown
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    (model / "config.json").write_text(json.dumps({**_CONFIG, "rope_scaling": yarn}))
    assert planned("--model", model, *_ROOMY[:4], "--set", "finetune.seq_len=512")[0] != 2
    assert planned("--model", model, *_ROOMY[:4], "--set", "finetune.seq_len=513")[0] == 2


def test_documents_are_planned_where_the_tokenizer_is_not_known(model: Path) -> None:
    """Of a directory of transformers nothing but config.json is read; the built-in model has none."""
    data = model / "chats.jsonl"
    data.write_text("{}\n")
    paths = ["--set", f"data.paths={data}", *_ROOMY[:4]]
    assert planned("--model", model, *paths)[0] != 2
    status, _, shown = planned(*paths)
    assert status == 2
    assert "chats.jsonl: .jsonl is read with the model's tokenizer, and this model has none" in shown


def test_pairs_of_no_rank(model: Path) -> None:
    for rank, message in (("0", "--lora: expected at least 1, got 0"), ("17", "--lora: expected 1 to 16")):
        status, _, shown = planned("--model", model, *_ROOMY, "--lora", rank)
        assert status == 2
        assert message in shown
