"""``tierstore plan``: what it prints, its exit status, and that it never imports torch."""

from dataclasses import replace
from pathlib import Path

import pytest
from child_process import run_python
from command_line import planned

from tierstore.machine_profile import ASSUMED, Cost, Evidence, save_profile
from tierstore.plan.presets import PRESETS
from tierstore.units import format_bytes

_ARRANGED = ("data_ranks", "expert_ranks", "tensor_ranks", "stages")
ROOMY = ["--memory", "4GiB", "--disk", "100GB"]


def test_the_main_job_fits() -> None:
    status, found, shown = planned(*ROOMY)
    assert status == 0
    assert found["fits"] is True
    assert found["remedy"] == []
    assert {term["evidence"] for term in found["terms"]} <= {"measured", "formula", "assumed"}
    for tier in ("device", "host", "nvme"):
        terms = [term["term_bytes"] for term in found["terms"] if term["tier"] == tier]
        assert found["totals"][f"{tier}_bytes"] == sum(terms)
    assert found["prediction"]["evidence"] == "assumed"
    assert found["prediction"]["step_s"] > 0
    assert found["paper"]["ssd_bytes"] == 12 * found["sparse_parameters_count"]
    assert "it fits" in shown
    assert "expert cache" in shown


def test_layouts_are_compared() -> None:
    """Two ranks as data and expert ranks, copies, tensor ranks, stages; the best one comes first, and its command last."""
    small = ("model.d_model=32", "model.d_ff=32", "model.seq_len=16", "data.batch_size=4")
    settings = [word for one in (*small, "data.micro_batches=2") for word in ("--set", one)]
    status, found, shown = planned(*ROOMY, "--layouts", "--ranks", "2", "--host-budget", "8MiB", *settings)
    assert status == 0
    assert found["ranks"] == found["node_ranks"] == 2
    times = [layout["step_s"] for layout in found["layouts"]]
    assert times == sorted(times)
    kinds = {tuple(one["layout"][name] for name in _ARRANGED) for one in found["layouts"]}
    assert kinds == {(2, 2, 1, 1), (2, 1, 1, 1), (1, 2, 2, 1), (1, 1, 1, 2)}
    assert "2 ranks, 2 per node: the fastest of each arrangement" in shown
    for layout in found["layouts"]:
        assert layout["loses_s"] == pytest.approx(layout["step_s"] - times[0])
        assert layout["sent_across_nodes_bytes"] == 0
        assert layout["sent_within_node_bytes"] == layout["sent_bytes"]
        assert layout["memory_bytes"] > 0
    compared = ("slower by", "sent within a node", "between nodes", "memory per rank")
    for title in (*compared, "Variants of the best arrangement"):
        assert title in shown
    settings = found["layouts"][0]["settings"]
    assert f"tierstore train --set parallel.expert={settings['parallel.expert']} " in shown


def test_a_step_goes_in_the_chunks_of_the_run(tmp_path: Path) -> None:
    """As many as are configured; and AUTO's, by the profile that the configuration names."""
    _, found, shown = planned(*ROOMY, "--ranks", "2", "--set", "parallel.pipeline_degree=2")
    told = found["pipeline_degree"]
    assert told["forward"]["taken_chunks_count"] == told["backward"]["taken_chunks_count"] == 2
    assert told["step_s"] == found["prediction"]["step_s"]
    assert "chunks of a step: 2 forward, 2 backward (parallel.pipeline_degree): the step takes" in shown
    path = tmp_path / "profile.json"
    save_profile(replace(ASSUMED, machine="another", all_to_all=Cost(30.0, 1e9)), path)
    settings = ("--set", f"parallel.profile={path}")
    _, found, shown = planned(*ROOMY, "--ranks", "2", *settings)
    assert found["pipeline_degree"]["chosen_by"] == "auto"
    assert "another" in shown
    assert "chunks of a step: 1 forward, 1 backward (auto" in shown


def test_what_does_not_fit_exits_1_with_the_way_out() -> None:
    status, found, shown = planned("--memory", "4GiB", "--disk", "3GB", "--set", "retain=2")
    assert status == 1
    assert found["fits"] is False
    assert [s["place"] for s in found["shortfalls"]] == ["disk"]
    assert found["remedy"] == [{"change": "retain = 0", "effect": "the same bits"}]
    assert "does not fit: disk" in shown
    assert "shortest way to make it fit: retain = 0" in shown


def test_what_no_change_helps_names_the_hardware_that_would() -> None:
    """A published model of 104 G parameters on a small machine, and then on the one that the plan asks for."""
    asked = ["--preset", "se-moe-104.1b", "--ranks", "8", "--device", "cpu"]
    status, found, shown = planned(*asked, "--memory", "24GiB", "--disk", "60GB")
    assert (status, found["remedy"]) == (1, [])
    hardware = found["hardware"]
    assert [s["place"] for s in hardware["shortfalls"]] == ["memory", "disk"]
    for shortfall, limit in zip(hardware["shortfalls"], (24 << 30, 60 * 10**9), strict=True):
        assert shortfall["limit_bytes"] == limit // 8
        assert shortfall["needed_bytes"] == hardware[f"{shortfall['place']}_bytes"] // 8
    assert "GiB on the host and device tiers (memory: " in shown
    assert "GiB on the nvme tier (disk: " in shown
    memory = format_bytes(hardware["memory_bytes"])  # the machine code of products depends on this processor
    assert 88 << 30 < hardware["memory_bytes"] < 108 << 30
    assert (
        f"sufficient hardware: a machine with {memory} of memory and 2.27 TiB of disk for its 8 ranks"
        in shown
    )
    budget = hardware["changes"][0]["change"].split('"')[1]
    status, found, _ = planned(
        *asked,
        *("--memory", hardware["memory_bytes"], "--disk", hardware["disk_bytes"]),
        *("--host-budget", budget),
    )
    assert (status, found["fits"], found["hardware"]) == (0, True, None)


def test_a_budget_that_cannot_be() -> None:
    status, found, _ = planned(*ROOMY, "--host-budget", "1MiB")
    assert status == 1
    assert found["shortfalls"][0]["place"] == "host_budget"
    assert found["prediction"] is None
    assert found["terms"] == []
    assert found["remedy"][0]["change"].startswith("host_budget = ")


@pytest.mark.parametrize("more", [(), ("--ranks", "2"), ("--ranks", "4", "--layouts")])
def test_a_model_without_experts_is_planned(more: tuple[str, ...]) -> None:
    given = ("--set", "model.moe_every=0", "--set", "data.micro_batches=4")
    status, found, shown = planned(*ROOMY, *given, *more)
    assert status == 0
    if "--layouts" in more:
        assert "stages 4" in shown
    else:
        assert found["sparse_parameters_count"] == 0
        assert found["pipeline_degree"] is None
        assert found["prediction"]["step_s"] > 0


def test_ranks_share_a_machine() -> None:
    _, alone, _ = planned(*ROOMY)
    _, shared, _ = planned(*ROOMY, "--ranks", "4")
    _, apart, _ = planned(*ROOMY, "--ranks", "4", "--ranks-per-node", "1")
    assert shared["limits"]["memory_bytes"] == alone["limits"]["memory_bytes"] // 4
    assert apart["limits"] == alone["limits"]
    assert shared["terms"] == apart["terms"]


def test_a_profile_is_named_as_evidence(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(replace(ASSUMED, evidence=Evidence.MEASURED, machine="four cores"), path)
    _, found, shown = planned(*ROOMY, "--profile", path)
    assert found["prediction"]["evidence"] == "measured"
    assert "four cores" in shown
    path.write_text("{}")
    status, _, shown = planned("--profile", path)
    assert status == 2
    assert str(path) in shown


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    many = ["--memory", "2TB", "--disk", "8TB", "--ranks", "2", "--ranks-per-node", "1"]
    status, found, _ = planned("--preset", name, *many, "--device", "cuda", "--device-memory", "1TB")
    assert found["parameters"] == PRESETS[name].architecture.parameters
    assert found["preset"]["source"] == PRESETS[name].source
    assert status == (0 if found["fits"] else 1)
    assert found["host_budget_bytes"] == 10**12


@pytest.mark.parametrize(
    ("name", "ranks", "published"), [("se-moe-13.9b", 8, 31_085), ("se-moe-207.2b", 128, 376_968)]
)
def test_table_1_of_se_moe(name: str, ranks: int, published: int) -> None:
    """A sequence for each A100, whose length the paper does not give: 2,048 tokens; its slots keep the experts."""
    node = ["--memory", "2TB", "--disk", "10TB", "--ranks", str(ranks), "--ranks-per-node", "8"]
    _, found, shown = planned("--preset", name, *node, "--set", "model.seq_len=2048")
    assert "A100 by its data sheet" in shown
    assert (found["device"], found["limits"]["device_bytes"]) == ("cuda", 80 * 10**9)
    assert published / 2 < found["prediction"]["tokens_per_s"] < 1.5 * published


def test_the_gpu_of_a_preset_gives_way_to_what_is_asked() -> None:
    asked = ["--preset", "ppmoe-6.7b", "--memory", "2TB", "--disk", "10TB", "--ranks", "8"]
    _, found, shown = planned(*asked)
    assert "V100 by its data sheet" in shown
    assert found["limits"]["device_bytes"] == 32 * 10**9
    _, found, shown = planned(*asked, "--profile", "H100")
    assert "H100 by its data sheet" in shown
    assert (found["device"], found["limits"]["device_bytes"]) == ("cuda", None)
    _, found, shown = planned(*asked, "--device", "cpu")
    assert "no profile" in shown
    assert found["device"] == "cpu"


def test_the_equations_of_pipeline_moe_have_its_gpus_ranks_and_experts() -> None:
    """64 experts of width 4,096, 8 tensor-parallel V100s: 40% of 125 TFLOP/s, 80% of NVLink's 150 GB/s."""
    many = ["--memory", "2TB", "--disk", "10TB", "--ranks", "128", "--ranks-per-node", "8"]
    _, found, _ = planned("--preset", "ppmoe-143b", *many, "--set", "parallel.tensor=8")
    flops, bandwidth, width = 50e12, 120e9, 4096
    assert found["tensor"]["paper_equation_5_corrected_ratio"] == pytest.approx(
        7 * flops / (4 * bandwidth * width)
    )
    assert found["tensor"]["paper_equation_2_corrected_ratio"] == pytest.approx(
        63 / 64 * flops / (8 * bandwidth * width)
    )
    assert found["tensor"]["paper_equation_2_printed_ratio"] == pytest.approx(
        63 * 64 * flops / (16 * bandwidth * width)
    )


def test_the_presets_are_listed() -> None:
    status, found, _ = planned("--preset", "list")
    assert status == 0
    assert [one["name"] for one in found["presets"]] == list(PRESETS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--preset", "gpt-5"], "--preset"),
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "2", "--ranks-per-node", "3"], "--ranks-per-node"),
        (["--memory", "much"], "--memory"),
        (["--alpha", "2"], "alpha"),
        (["--profile", "nowhere.json"], "nowhere.json"),
        (["--set", "model.d_modl=3"], "model.d_model"),
        (["nowhere.toml"], "nowhere.toml"),
    ],
)
def test_bad_input(arguments: list[str], named: str) -> None:
    status, _, shown = planned(*arguments)
    assert status == 2
    assert named in shown.splitlines()[-1]


def test_it_answers_without_torch() -> None:
    """Torch alone takes a second to import."""
    code = (
        "import sys\n"
        "from tierstore.cli.main import cli\n"
        "try:\n"
        "    cli.main(['plan', '--preset', 'olmoe-1b-7b', '--json'])\n"
        "except SystemExit:\n"
        "    assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    run_python(code)
