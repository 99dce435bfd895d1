"""Each experiment runs at its smallest size, as its documentation calls it, and finds what does not depend on time."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "experiments"
Found = dict[str, Any]

_WORDS = "--layers 2 --d-model 16 --tokens 4 --rounds 1 --steps 1"
_NODES = (
    "--layouts 2x2 --latencies-s 0.001 --bandwidths-bytes-per-s 50000000 --message-bytes 500 2000 --rounds 1"
)
_RING = "--layers 5 --experts 2 --expert-bytes 8192 --forward-s 0.0002 --passes 1 --rounds 2 --shares 0.4 0.8 --loads 0.9"

_CLOCK = "--models small --places device drives --tokens 1024 --layers 1 --steps 2 --loads 1 --check-steps 1"

#: A run to kill.
_TINY = """
steps = 40
commit_every = 10
eval_every = 10
model = {d_model = 32, n_heads = 2, n_layers = 1, seq_len = 32, d_ff = 32, experts = 4}
"""

#: The smallest size of each.
SMALLEST = {
    "clock": _CLOCK,
    "collectives": _WORDS,
    "embedding": "--ranks 2 --vocab 9000 --d-model 128 --tokens 16 --small-tokens 128 --rounds 1 --steps 1",
    "exchange": f"{_NODES} --network process",
    "killed": "--config tiny.toml --work killed --memory 600MiB --kills 2",
    "layouts": "--ranks 1 --rounds 1 --steps 1",
    "memory": "--width 32 --layers 2 --experts 4 --steps 2 --runs train train-layer-order generate-long verify",
    "papers": "--tables PipeMoE-6",
    "pipemoe": "--layers 1 --rounds 1 --slowdown 0.02 --experts 2 12",
    "pipemoe_solvers": "--cases 50",
    "ppmoe": "--ranks 2 --tokens 32 --width 8 --rounds 1 --pass-s 0.002 --seq-len 4 --steps 1",
    "prediction": "--cases 1 --layers 3 --steps 1 --warmup 1 --forward-s 0.001",
    "quant": "--inputs 200 --outputs 40 --rows 1 3 --weight-bytes 100000 --repeats 2",
    "recipe": "--shapes 32x1 --seeds 0 --steps 2 --batch 2 --seq-len 16 --host-budget 1000000",
    "ring": _RING,
    "stages": "--stages 2 --micro-batches 1 --forward-s 0.001 --backward-s 0.002 --rounds 1 --svg picture.svg",
    "tasks": "--time-scale 200 --rounds 1 --steps 1",
    "uploads": "--layers 2 --experts 2 --slots 2 4 --depth 0",
}


def run(name: str, options: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / f"{name}.py", *options.split()]
    # As a user calls it: with the script's directory on the path, which the suite's environment keeps off.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    return subprocess.run(
        command, cwd=directory, env=environ, capture_output=True, text=True, check=False, timeout=300
    )


def check_clock(found: Found) -> None:
    device, drives = found["steps"]
    for step in (device, drives):
        assert step["bound_ratio"] >= 1
        assert sum(step["path_s"].values()) == pytest.approx(step["step_s"])
        # Of 128 experts of 3 x 128 x 74 bf16 weights, 256 times smaller, nearly all: up, and their gradients down.
        least = 0.8 * 128 * 3 * 128 * 74 * 2 * 256 / (0.8 * 64e9)
        assert min(step["busy_s"]["h2d"], step["busy_s"]["d2h"]) >= least
    assert drives["busy_s"]["drives"] > 0 == device["busy_s"].get("drives", 0)
    assert [check["load_ratio"] for check in found["checks"]] == [1]


def check_collectives(found: Found) -> None:
    assert found["same_bits"] is True
    assert found["apart"]["collectives_count"] > found["fused"]["collectives_count"]


def check_embedding(found: Found) -> None:
    for table in (found["large"], found["small"]):
        for way in ("gathered", "partitioned"):
            assert table[way]["sent_bytes"] == pytest.approx(table[way]["calculated_sent_bytes"], rel=0.05)
        losses = [table[way]["first_loss"] for way in ("gathered", "partitioned")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert found["large"]["sent_ratio"] < 1 < found["small"]["sent_ratio"]
    assert (found["large"]["auto"], found["small"]["auto"]) == ("partitioned", "gathered")
    # Beside slices, alike in both: gathered on two ranks, tied, the table in a buffer, its gradients twice, and once each as
    # the head, as the embedding and as their sum; partitioned, half of those three. 1 + 2 + 3 - 3/2.
    assert found["large"]["calculated_saved_bytes"] == pytest.approx(4.5 * 9000 * 128 * 4, rel=0.02)


def check_memory(found: Found) -> None:
    assert len(found["runs"]) == 4
    assert all(0.85 <= run["ratio"] <= 1.03 for run in found["runs"])


def check_recipe(found: Found) -> None:
    (run,) = found["runs"]
    assert run["lr"] == 2e-3 * 2 / 10  # two of ten steps of warm-up
    assert len(run["losses"]) == len(run["held_out_losses"]) == 2
    assert run["losses"][0] == pytest.approx(5.55, abs=0.1)  # of 256 bytes, alike


def check_exchange(found: Found) -> None:
    counts = [(case["flat_messages_count"], case["hierarchical_messages_count"]) for case in found["cases"]]
    assert counts == [(2, 1)] * 2
    # Two messages of 1 ms each, one after the other; or one, behind the step within the node. Waiting takes its time.
    assert all(case["flat_s"] >= 2e-3 and case["hierarchical_s"] >= 1.5e-3 for case in found["cases"])


def check_killed(found: Found) -> None:
    whole, killed = found["whole"], found["killed"]
    assert (whole["kills_s"], len(killed["kills_s"])) == ([], 2)
    assert whole["summary"]["records_crc32c"] == killed["summary"]["records_crc32c"]
    assert whole["summary"]["train_loss"] == killed["summary"]["train_loss"]
    assert len(killed["first_steps_s"]) == 3


def check_layouts(found: Found) -> None:
    assert (found["judged_count"], len(found["layouts"])) == (2, 4)
    assert all(each["step_s"] > 0.1 < each["predicted_step_s"] for each in found["layouts"])


def check_pipemoe(found: Found) -> None:
    assert [each["phase"] for each in found["passes"]] == ["forward", "backward"] * 2
    assert [each["experts_count"] for each in found["by_experts"]] == [2, 12]
    assert all(list(each["times_s"]) == ["1", "2", "3", "4", "6", "8"] for each in found["passes"])


def check_papers(found: Found) -> None:
    assert [row["ours_to_published_ratio"] < 0.5 for row in found["rows"]] == [True, False, False, False]
    assert len(found["pipemoe_figure_4"]) == 3


def check_pipemoe_solvers(found: Found) -> None:
    assert (found["cases_count"], found["disagreements_count"]) == (50, 0)


def check_ppmoe(found: Found) -> None:
    """32 tokens of 32 bytes on 2 ranks: the all-reduce sends 1 KiB a rank, whatever K is."""
    one, two = (case["sent"] for case in found["cases"])
    assert one["all-reduce"]["sent_bytes"] == two["all-reduce"]["sent_bytes"] == 2 * 1024
    # Rows, one a token: half of them from each rank. Two all-to-alls: half of 16 tokens there and back.
    assert one["rows"]["sent_bytes"] == 2 * 16 * 32
    assert one["all-to-all"]["sent_bytes"] == 2 * 2 * 8 * 32
    # With the backward pass as much again, and the weights' gradients, 4 bytes a row.
    assert two["rows"]["passes_bytes"] == 2 * (2 * 32 * 32 + 32 * 4)
    for sent in (*one.values(), *two.values()):
        assert sent["sent_bytes"] == sent["formula_bytes"]
        assert sent.get("passes_bytes") == sent.get("passes_formula_bytes")
    expected = [of["expected_ratio"] for case in found["cases"] for of in case["crossovers"].values()]
    assert expected == [1.0, 2.0, 1.0, 1.0]
    data, tensor = found["twins"]
    assert (
        data["network_all_reduce_ratio"] == 0 < tensor["network_all_reduce_ratio"] < tensor["network_ratio"]
    )
    for twin in (data, tensor):
        parts = [twin[f"{name}_ratio"] for name in ("gating", "experts", "rows")]
        assert twin["moe_ratio"] == pytest.approx(sum(parts))
        assert 0 < min(parts) < twin["moe_ratio"] < 1 - twin["network_ratio"]
        assert twin["speed_ratio"] == pytest.approx(twin["backbone_step_s"] / twin["moe_step_s"])


def check_prediction(found: Found) -> None:
    (case,) = found["cases"]
    assert case["predicted_sent_bytes"] == case["measured_sent_bytes"]


def check_quant(found: Found) -> None:
    names = [(row["format"], row["rows_count"]) for row in found["products"]]
    assert names == [(name, rows) for rows in (1, 3) for name in ("copy", "bf16", "int8", "int4")]
    int8, int4 = found["errors"]["int8"], found["errors"]["int4"]
    # Four blocks a row, of which the last is an eighth full; zeros to whole lines.
    assert int8["bytes_per_parameter"] == 40 * 4 * 68 / 8000
    assert int4["bytes_per_parameter"] == 40 * 4 * 40 / 8000
    assert 0.002 < int8["weight_error_ratio"] < 0.01
    assert 0.04 < int4["weight_error_ratio"] < 0.12
    assert all(0 <= each["product_error_ratio"] < 1e-6 for each in (int8, int4))


def check_ring(found: Found) -> None:
    """2 and 4 of 5 layers: an expert is two pages of 4 KiB."""
    assert found["resident_device_bytes"] == 5 * 2 * 8192
    rings = [(ring["layers_count"], ring["load_ratio"], ring["device_bytes"]) for ring in found["rings"]]
    assert rings == [(2, 0.9, 4 * 8192), (4, 0.9, 8 * 8192), (2, None, 4 * 8192), (4, None, 8 * 8192)]
    assert [ring["saved_ratio"] for ring in found["rings"]] == pytest.approx([0.6, 0.2, 0.6, 0.2])


def check_stages(found: Found) -> None:
    (pipeline,) = found["pipelines"]
    assert pipeline["in_order"]
    assert pipeline["held_count"] == [2, 1]
    assert pipeline["model_s"] == pytest.approx(0.009)
    assert pipeline["step_s"] >= 0.009  # (2 + 1) x 3 ms, however fast the machine is
    by_order = {(each["order"], each["micro_batches_count"]): each for each in found["traffic"]}
    for count in (2, 4):
        assert by_order["1F1B", count]["read_ratio"] >= by_order["layer order", count]["read_ratio"]


def check_tasks(found: Found) -> None:
    modes = found["modes"].values()
    assert found["every_example_once"] is True
    assert [mode["samples_count"] for mode in modes] == [1024] * 3 + [782] * 2
    assert [mode["cards_count"] for mode in modes] == [4, 8, 8, 8, 8]
    assert all(
        mode["step_s"] >= mode["predicted_step_s"] for mode in modes
    )  # sleeping takes at least its time


def check_uploads(found: Found) -> None:
    """E = 4, and 2 layers of 2. Two slots are those of the layer that computes: two are found at a turn, none of a round."""
    assert {case["way"]: (case["least_count"], case["most_count"]) for case in found["cases"][:4]} == {
        "one micro-batch": (2 * 4 - 2, 2 * 4),
        "evaluation": (4 - 2, 4),
        "micro order": (4 * 4 - 3 * 2, 4 * 4),
        "layer order": (2 * 4 - 2, 2 * 4),
    }
    assert [case["copies_count"] for case in found["cases"]] == [6, 4, 10, 6, 4, 0, 4, 4]


CHECKS: dict[str, Callable[[Found], None]] = {name: globals()[f"check_{name}"] for name in SMALLEST}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_an_experiment_at_its_smallest_size(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What it finds is right; status 1 and its reasons are allowed, since at this size times vary."""
    if name != "memory":  # which measures its processes'
        request.getfixturevalue("forked_python")
    (tmp_path / "tiny.toml").write_text(_TINY)
    done = run(name, SMALLEST[name], tmp_path)
    assert done.returncode in (0, 1), done.stderr
    *table, last = done.stdout.splitlines()
    assert table
    CHECKS[name](json.loads(last))
    for picture in tmp_path.glob("*.svg"):
        assert bars(picture) == [("4c72b0", 2), ("dd8452", 2)] * 2  # of two stages two passes each way


def test_every_experiment_has_its_smallest_size() -> None:
    """Apart from those that need a store or a trace and have tests of their own."""
    scripts = {path.stem for path in SCRIPTS.glob("*.py")} - {"emulation"}
    assert scripts - SMALLEST.keys() == {"guesses", "policy_study"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_what_cannot_be_measured_is_one_line(tmp_path: Path) -> None:
    done = run("exchange", "--layouts 1x2", tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"exchange\.py: error: --layouts: expected .*\n", done.stderr), done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_picture_of_chunks(tmp_path: Path) -> None:
    """Of a layer in 1, 2 and 4 chunks as many dispatches, combines and experts, forward and backward."""
    assert run("pipemoe", "--svg chunks.svg --rounds 1", tmp_path).returncode == 0
    drawn = bars(tmp_path / "chunks.svg")
    for colours, counts in ((("55a868", "8172b3"), [2, 4, 8]), (("4c72b0", "dd8452"), [1, 2, 4])):
        for colour in colours:
            assert [count for name, count in drawn if name == colour] == counts


def bars(picture: Path) -> list[tuple[str, int]]:
    """The bars of a row: their colour, and how many."""
    drawn = re.findall(r'<path fill="#(\w+)"[^>]* d="([^"]*)"', picture.read_text())
    return [(colour, path.count("M")) for colour, path in drawn]
