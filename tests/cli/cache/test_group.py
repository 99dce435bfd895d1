"""``tierstore cache`` as a user sees it: tables, objects, what is pasted, and every bad input in one line."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import command_line
import numpy as np
import pytest
from click.testing import Result
from command_line import tiny_run

from tierstore._native import policy_names
from tierstore.machine_profile import ASSUMED, Cost, Evidence, save_profile
from tierstore.trace.files import TraceWriter, read_header
from tierstore.trace.format import TraceHeader, TraceKind, TraceRecord

LAYERS, EXPERTS, STEPS = 3, 8, 60


def call(*arguments: object) -> Result:
    return command_line.invoke("cache", *arguments)


def done(*arguments: object) -> Result:
    return command_line.done("cache", *arguments)


def found(*arguments: object) -> dict[str, Any]:
    return command_line.object_of("cache", *arguments)


def refused(*arguments: object) -> str:
    """The one line of a refusal."""
    result = call(*arguments)
    assert result.exit_code == 2, (result.stdout, result.stderr)
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("tierstore: error: ")
    return lines[-1].removeprefix("tierstore: error: ")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forward and backward passes, some experts much oftener than others; a mebibyte each."""
    path = tmp_path_factory.mktemp("traces") / "run.trace"
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, EXPERTS + 1)
    record = [
        TraceRecord(layer, (1, 0, 0), (1 << 20, 0, 0), 1) for layer in range(LAYERS) for _ in range(EXPERTS)
    ]
    with TraceWriter(path, TraceHeader(capacity_frames=24, records=tuple(record))) as writer:
        for step in range(STEPS):
            chosen = [
                np.sort(rng.choice(EXPERTS, 2, replace=False, p=weights / weights.sum())) + layer * EXPERTS
                for layer in range(LAYERS)
            ]
            for phase, order in ((1, range(LAYERS)), (2, reversed(range(LAYERS)))):
                for layer in order:
                    flags = np.full(2, 1 if phase == 1 else 9, np.uint16)
                    writer.event(
                        TraceKind.ACCESS,
                        step=step,
                        phase=phase,
                        layer=layer,
                        records=chosen[layer].astype(np.uint32),
                        flags=flags,
                    )
            writer.event(TraceKind.END_STEP, step=step)
    return path


# What they do ------------------------------------------------------------------------------------------------


def test_simulate(trace: Path) -> None:
    value = found("simulate", trace, "--capacity", "0.25", "--capacity", "12MiB", "--compute", "0.01")
    assert value["contract"] == "event-atomic"
    assert value["trace"]["requests"] == STEPS * LAYERS * 4
    assert value["trace"]["total_bytes"] == 24 << 20
    assert [(one["policy"], one["capacity_frames"]) for one in value["outcomes"]] == [
        (policy, frames) for policy in ("lru", "lfu-decay", "belady") for frames in (6, 12)
    ]
    for one in value["outcomes"]:
        assert one["hits"] + one["misses"] + one["creates"] == one["requests"]
        assert one["starved"] == 0
        assert one["evidence"]["misses"] == "simulated"
        assert one["evidence"]["policy_s"] == "measured"
        assert one["evidence"]["step_stall_s"] == "estimated"
        assert one["read_bytes"] == one["misses"] << 20
        assert one["capacity_bytes"] == one["capacity_frames"] << 20
        assert one["step_stall_s"] > 0
        assert one["drive_life_years"] > 0
        assert one["policy_s"] > 0
    assert value["assumptions"]["read bandwidth"] == "100 us an entry and 2 GB/s (assumed)"


def test_simulate_says_what_its_numbers_are(trace: Path) -> None:
    out = done("simulate", trace, "--policy", "lru", "--policy", "lfu-decay:half_life=4").stdout
    for said in (
        "lfu-decay(half_life=4)",
        "50.0%, 12 MiB",
        "event-atomic, no lookahead, global scope;",
        "measured",
        "estimated",
    ):
        assert said in out


def test_starvation_is_said(trace: Path) -> None:
    asked = ("simulate", trace, "--policy", "lfu-decay:threshold=3,half_life=0.5", "--capacity", "0.25")
    (one,) = found(*asked)["outcomes"]
    assert one["starved"] > 0
    assert f"was starved {one['starved']} times" in done(*asked).stdout


def test_a_warm_up_is_not_counted(trace: Path) -> None:
    value = found("simulate", trace, "--policy", "lru", "--warmup", 20)
    assert value["outcomes"][0]["steps"] == STEPS - 20
    assert value["outcomes"][0]["requests"] == (STEPS - 20) * LAYERS * 4


def test_scope_and_contract(trace: Path) -> None:
    (one,) = found(
        "simulate", trace, "--policy", "lru", "--scope", "layer", "--contract", "sequential", "--threads", 1
    )["outcomes"]
    assert (one["scope"], one["contract"]) == ("layer", "sequential")


def test_curve(trace: Path) -> None:
    value = found("curve", trace, "--points", 4)
    assert value["keep_ratio"] == [0.75, 0.5, 0.25, 0]
    by_policy = {
        curve["policy"]: [point["miss_ratio"] for point in curve["points"]] for curve in value["curves"]
    }
    assert {"lru", "lfu-decay", "belady"} <= set(by_policy)
    for ratios in by_policy.values():
        assert len(ratios) == 4
        assert all(least <= ratio + 1e-12 for least, ratio in zip(by_policy["belady"], ratios, strict=True))
    out = done("curve", trace, "--policy", "lru", "--policy", "belady").stdout
    assert "1 - C/N" in out
    assert "all numbers simulated" in out


def test_tune_and_what_it_prints_is_taken_by_train(trace: Path, tmp_path: Path) -> None:
    written = tmp_path / "cache.toml"
    value = found("tune", trace, "--capacity", "0.4", "--out", written)
    assert value["verdict"] in ("better", "tie", "worse")
    assert value["chosen"]["steps"] == STEPS - value["tuned_steps"] == STEPS // 2
    assert (value["miss_gain_low_ratio"], value["miss_gain_high_ratio"]) == (None, None)  # too few steps
    assert value["verdict"] == "tie"
    said = done("tune", trace, "--capacity", "0.4", "--policy", "lru").stdout
    assert "no interval: too few independent steps" in said
    longer = found("tune", trace, "--capacity", "0.4", "--prefix", "0.1")
    assert longer["miss_gain_low_ratio"] <= longer["miss_gain_ratio"] <= longer["miss_gain_high_ratio"]
    assert [one["policy"] for one in value["ranked"]].count(value["chosen"]["policy"]) >= 1
    assert value["ranked"][0]["miss_ratio"] == value["best"]["miss_ratio"]
    assert value["scored"] == "no lookahead"
    assert value["configuration"] == written.read_text()
    assert "cache" in tomllib.loads(written.read_text())
    out = done("tune", trace, "--capacity", "0.4", "--objective", "stall").stdout
    for said in (
        "A pass requests 2.0 of a layer's 8.0 frames",
        "interval",
        "[cache]",
        "the finalists in hindsight",
    ):
        assert said in out


def test_import_then_simulate(tmp_path: Path) -> None:
    source, trace, keys = tmp_path / "keys.txt", tmp_path / "keys.trace", tmp_path / "names"
    source.write_text("a\nb\na\nc\n" * 30)
    value = found("import", source, trace, "--keys", keys)
    assert (value["kind"], value["requests"], value["records"]) == ("text", 120, 3)
    assert keys.read_text() == "a\nb\nc\n"
    (one,) = found("simulate", trace, "--policy", "lru", "--capacity", "1.0")["outcomes"]
    assert (one["misses"], one["hits"]) == (3, 117)
    assert "120 requests for 3 records" in done("import", source, tmp_path / "again").stdout


def test_unequal_sizes_have_no_bound_and_what_is_too_large_passes(tmp_path: Path) -> None:
    source, trace = tmp_path / "sizes.csv", tmp_path / "sizes.trace"
    source.write_text("2,1\n2,1\n1,2\n0,3\n1,2\n2,1\n")
    done("import", source, trace, "--kind", "csv", "--set", "size=2", "--set", "frame_bytes=1")
    arguments = (trace, "--policy", "lfu", "--policy", "belady", "--capacity")
    six = found("simulate", *arguments, "4")["outcomes"]
    assert [(one["role"], one["misses"], one["not_admitted"]) for one in six] == [
        ("policy", 4, 0),
        ("clairvoyant", 5, 0),
    ]
    shown = done("simulate", *arguments, "4").stdout
    assert "belady (clairvoyant)" in shown
    assert "not admitted" not in shown
    # In 2 bytes the one of 3 is a miss; the others are as if it were not there: 2 hits, 1 and then 2 again do not.
    two = found("simulate", trace, "--policy", "lru", "--capacity", "2")["outcomes"]
    assert [(one["hits"], one["misses"], one["not_admitted"]) for one in two] == [(2, 4, 1)]
    shown = done("simulate", trace, "--policy", "lru", "--capacity", "2").stdout
    assert "0.6667, 1 not admitted" in shown
    assert "are misses and are not admitted: 1 at 33.3%" in shown
    curves = found("curve", trace, "--points", "6", "--policy", "lru", "--policy", "belady")["curves"]
    assert [curve["role"] for curve in curves] == ["policy", "clairvoyant"]
    assert [one["not_admitted"] for one in curves[0]["points"]] == [3, 1, 0, 0, 0, 0]
    shown = done("curve", trace, "--points", "6", "--policy", "lru", "--policy", "belady").stdout
    assert "belady (clairvoyant)" in shown
    assert "are misses and are not admitted: 3 at 16.7%, 1 at 33.3%" in shown
    assert "(bound)" not in shown
    source.write_text("".join(f"{key},{size}\n" for key, size in ((0, 9), (1, 1), (2, 1))) * 20)
    done(
        "import",
        source,
        trace,
        "--kind",
        "csv",
        *["--set", "size=2", "--set", "frame_bytes=1", "--set", "requests_per_step=3"],
    )
    tuned = found("tune", trace, "--capacity", "2")
    assert "clairvoyant" in tuned["advice"]
    assert {(one["hits"], one["not_admitted"]) for one in tuned["ranked"]} == {(20, 10)}
    assert "not admitted" in done("tune", trace, "--capacity", "2").stdout


def test_a_file_between_blanks_and_what_was_read_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.tr").write_text("0 5 10\n1 6 100\n2 5 10\n")
    settings = ("--set", "key=2", "--set", "size=3", "--set", "delimiter= ")
    value = found("import", tmp_path / "a.tr", tmp_path / "trace", "--kind", "csv", *settings)
    assert (value["records"], value["requests"], value["total_bytes"]) == (2, 3, 110)
    assert (value["columns"]["key"], value["columns"]["size"]) == ("column 2", "column 3")
    said = done("import", tmp_path / "a.tr", tmp_path / "trace", "--kind", "csv", *settings).stdout
    assert "read as csv: delimiter blank, header none, key column 2, size column 3, time not read\n" in said


def test_large_objects_miss_as_often_as_small_ones(tmp_path: Path) -> None:
    """Two objects of 5 and 3 GB fit into 8.6 GB: of ten requests the first two miss, whatever a frame is."""
    (tmp_path / "big.csv").write_text("a,5000000000\nb,3000000000\n" * 5)
    given = ("import", tmp_path / "big.csv", tmp_path / "trace", "--set", "size=2", "--set")
    assert "key 'a' of 5000000000 bytes" in refused(*given, "frame_bytes=1")
    assert not (tmp_path / "trace").exists()
    for frame in (2, 3, 1000):
        done(*given, f"frame_bytes={frame}")
        (one,) = found("simulate", tmp_path / "trace", "--policy", "lru", "--capacity", "8600000000")[
            "outcomes"
        ]
        assert (one["misses"], one["miss_ratio"]) == (2, 0.2)
    for size in ("9" * 5000, "9300000000GB"):
        assert "--capacity: expected a size of less than 2^63" in refused(
            "simulate", tmp_path / "trace", "--capacity", size
        )


def test_objects_of_no_bytes(tmp_path: Path) -> None:
    """Four keys in turn through two frames: LRU misses all 40 requests. No byte is read, and nothing is NaN; each of the
    four reads of a step takes its latency of 100 us.
    """
    (tmp_path / "zero.csv").write_text("a,0\nb,0\nc,0\nd,0\n" * 10)
    trace = tmp_path / "trace"
    done("import", tmp_path / "zero.csv", trace, "--set", "size=2", "--set", "requests_per_step=4")
    (one,) = found("simulate", trace, "--policy", "lru", "--capacity", "0.5")["outcomes"]
    assert (one["misses"], one["miss_ratio"], one["read_bytes"], one["step_stall_s"]) == (
        *(40, 1.0, 0),
        pytest.approx(4e-4),
    )
    for command in (
        ("curve", "--html", tmp_path / "curve.html"),
        ("tune", "--objective", "misses"),
        ("tune", "--objective", "bytes"),
        ("tune", "--objective", "stall"),
    ):
        value = json.dumps(found(command[0], trace, *command[1:]))
        assert "NaN" not in value
        assert "Infinity" not in value
    assert ">nan" not in (tmp_path / "curve.html").read_text().lower()


def test_the_layers_of_a_log_are_imported_together(tmp_path: Path) -> None:
    parts = []
    for layer in (1, 0):
        parts.append(tmp_path / f"layer_{layer}.jsonl")
        parts[-1].write_text("".join(json.dumps({"topk_ids": [ids]}) + "\n" for ids in ([1, 2], [2, 3], [1])))
    value = found("import", "--kind", "vllm", *parts, tmp_path / "trace")
    assert (value["steps"], value["layers"], value["records"], value["requests"]) == (3, 2, 6, 10)
    assert "SOURCE and TRACE" in refused("import", parts[0])


def test_the_options_of_an_import_are_listed() -> None:
    out = done("import", "--list-options", "--kind", "npz").stdout
    assert "tokens_per_step" in out
    options = found("import", "--list-options", "--kind", "npz")["options"]["npz"]
    assert {"name", "type", "default", "help"} == set(options[0])
    assert "tokens_per_step" in {option["name"] for option in options}


# What they refuse --------------------------------------------------------------------------------------------


def test_refusals(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"no trace at all")
    missing = tmp_path / "missing"
    cases: list[tuple[tuple[object, ...], str]] = [
        ((), "no command given"),
        (("simulate",), "TRACE"),
        (("simulate", missing), str(missing)),
        (("simulate", other), "expected a trace"),
        (("curve", other), str(other)),
        (("tune", other), str(other)),
        (("simulate", trace, "--policy", "mru"), "--policy: policy 'mru': expected one of"),
        (
            ("simulate", trace, "--policy", "lru:speed=1"),
            "--policy: cache policy 'lru' has no option 'speed'",
        ),
        (("simulate", trace, "--policy", "lfu-decay:threshold"), "got 'threshold'"),
        (("simulate", trace, "--policy", "lfu-decay:half_life=-1"), "half_life"),
        (("simulate", trace, "--capacity", "much"), "--capacity: expected a size"),
        (("simulate", trace, "--capacity", "0.001"), "--capacity: '0.001' is less than a frame"),
        (("simulate", trace, "--capacity", "2.5"), "--capacity"),
        (("simulate", trace, "--capacity", "0.05", "--scope", "layer"), "capacity: 1 frames"),
        (("simulate", trace, "--scope", "rank"), "--scope"),
        (("simulate", trace, "--contract", "none"), "--contract"),
        (("simulate", trace, "--warmup", STEPS), "--warmup: expected fewer than the 60 steps"),
        (("simulate", trace, "--warmup", -1), "--warmup"),
        (("simulate", trace, "--read", "0"), "--read: expected more than 0"),
        (("simulate", trace, "--write", "fast"), "--write: expected a size"),
        (("simulate", trace, "--compute", "-1"), "--compute: expected at least 0"),
        (("simulate", trace, "--endurance", "0"), "--endurance: expected more than 0"),
        (("simulate", trace, "--steps-per-s", "0"), "--steps-per-s: expected more than 0"),
        (("curve", trace, "--points", "0"), "--points"),
        (("curve", trace, "--html", missing / "deep.html"), "--html"),
        (("tune", trace, "--out", missing / "cache.toml"), f"--out: there is no directory {missing}"),
        (("tune", trace, "--prefix", "1"), "--prefix: expected a fraction"),
        (("tune", trace, "--confidence", "0"), "--confidence: expected"),
        (("tune", trace, "--objective", "joy"), "--objective"),
        (("tune", trace, "--policy", "belady"), f"one of {', '.join(policy_names())}, got 'belady'"),
        (("tune", trace, "--policy", "lru:x=1"), "has no option 'x'"),
        (
            ("tune", trace, "--policy", "lfu-decay:half_life=1"),
            "--policy: expected a policy's name without options",
        ),
        (("tune", trace, "--policy", "mru"), f"one of {', '.join(policy_names())}, got 'mru'"),
        (("report", trace), "--html"),
        (("import", other), "SOURCE and TRACE"),
        (("import", missing, other), str(missing)),
        (("import", other, missing, "--kind", "elf"), "--kind"),
        (("import", other, missing, "--kind", "npz"), str(other)),
        (("import", other, missing, "--kind", "text", "--set", "speed=1"), "speed"),
        (("import", other, missing, "--set", "speed"), "KEY=VALUE"),
        (("record",), "TRACE"),
    ]
    for arguments, said in cases:
        assert said in refused(*arguments), arguments
    assert not missing.exists()


def test_a_cut_trace_is_refused_where_it_is_cut(trace: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.trace"
    cut.write_bytes(trace.read_bytes()[:-40])
    assert "at byte" in refused("simulate", cut)


def test_too_short_a_trace_cannot_be_tuned(tmp_path: Path) -> None:
    source, short = tmp_path / "keys.txt", tmp_path / "short.trace"
    source.write_text("a\nb\n")
    done("import", source, short)
    assert "expected at least 4 steps" in refused("tune", short, "--capacity", "1.0")


# A real run --------------------------------------------------------------------------------------------------

RUN = {"steps": 8, "commit_every": 0, "eval_every": 0}


def test_record_tune_paste_and_train_again(tmp_path: Path) -> None:
    config, trace = tiny_run(tmp_path, RUN), tmp_path / "run.trace"
    first = found("record", trace, config, "--store", tmp_path / "first", "--checksum")
    tuned = found("tune", trace, "--capacity", "0.4", "--scope", "layer")
    assert tuned["trace"]["steps"] >= 8
    config.write_text(config.read_text() + tuned["configuration"])
    result = command_line.done("train", config, "--store", tmp_path / "second", "--json", "--checksum")
    second = json.loads(result.stdout)
    assert isinstance(first["records_crc32c"], int)
    assert second["records_crc32c"] == first["records_crc32c"]
    with trace.open("rb") as file:
        assert read_header(file).clock == "steps"
    assert f"cache policy: {tuned['chosen']['policy']}" in result.stderr


def test_the_slots_of_a_device_are_tuned_beside_the_host_cache(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, RUN | {"weights_in_place": "off", "device_budget": "80KB"})
    trace = tmp_path / "run.trace"
    first = found("record", trace, config, "--store", tmp_path / "first", "--checksum")
    tuned = found("tune", trace, "--capacity", "0.4", "--out", tmp_path / "cache.toml")
    (device,) = tuned["device"]
    with (tmp_path / "run.device-1.trace").open("rb") as file:
        header = read_header(file)
    assert device["trace"]["steps"] >= 8
    assert device["chosen"]["capacity_frames"] == header.capacity_frames > 2
    assert device["scored"].startswith("the recorded prefetches")
    assert all(outcome["scope"] == "global" for outcome in device["ranked"])
    keys = tomllib.loads((tmp_path / "cache.toml").read_text())["cache"]
    assert tuned["configuration"] == (tmp_path / "cache.toml").read_text()
    assert {"policy", "scope", "device_policy"} <= keys.keys()
    assert tomllib.loads(device["configuration"])["cache"].items() <= keys.items()
    config.write_text(config.read_text() + tuned["configuration"])
    result = command_line.done("train", config, "--store", tmp_path / "second", "--json", "--checksum")
    assert json.loads(result.stdout)["records_crc32c"] == first["records_crc32c"]
    assert f"policy of device slots: {keys['device_policy']}" in result.stderr
    (tmp_path / "run.device-1.trace").unlink()
    assert found("tune", trace, "--capacity", "0.4")["device"] == []


# Reports -----------------------------------------------------------------------------------------------------


def test_costs_as_measured_here(trace: Path, tmp_path: Path) -> None:
    profile, config = tmp_path / "machine.json", tmp_path / "run.toml"
    measured = replace(ASSUMED, evidence=Evidence.MEASURED, machine="8 cores", disk_read=Cost(0.001, 1 << 20))
    save_profile(measured, profile)
    config.write_text("[model]\nd_model = 32\nd_ff = 64\nexperts = 4\nseq_len = 16\n")
    options = ("--policy", "lru", "--capacity", "0.4", "--overlap", "serial", "--profile", profile)
    value = found("simulate", trace, *options, "--run", config)
    assert value["assumptions"]["read bandwidth"].endswith(
        "an entry and 1.049 MB/s (measured profile: 8 cores)"
    )
    assert value["assumptions"]["computation"].endswith("(predicted by plan, measured profile: 8 cores)")
    assert value["assumptions"]["endurance"] == "600 TB written (assumed)"
    said = done("simulate", trace, *options, "--mixed", "2GB", "--drive", "2TB").stdout
    assert "read bandwidth 1 ms an entry and 1.049 MB/s (measured profile: 8 cores)" in said
    assert "mixed bandwidth 2 GB/s (given)" in said
    assert "computation 0 us a step (assumed)" in said
    assert "drive 2 TB (given)" in said
    profile.write_text("{}")
    assert "expected a machine profile of version" in refused("simulate", trace, "--profile", profile)
    config.write_text("[cache]\npolicy = 'mru'\n")
    assert "unknown cache policy 'mru'" in refused("simulate", trace, "--run", config)


def test_reports(trace: Path, tmp_path: Path) -> None:
    for number, arguments in enumerate((("curve", "--points", 3), ("report", "--points", 3))):
        html = tmp_path / f"{number}.html"
        value = found(arguments[0], trace, *arguments[1:], "--html", html)
        page = html.read_text()
        assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
        assert value["contract"] == "event-atomic"
        if arguments[0] == "report":
            assert value["assumptions"]["read bandwidth"] == "100 us an entry and 2 GB/s (assumed)"
        for said in ("run.trace", value["trace"]["sha256"][:12], "event-atomic", "simulated", "estimated"):
            assert said in page, (arguments, said)
