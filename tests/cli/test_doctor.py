"""tierstore doctor."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command_line import done, invoke, object_of
from conftest_store import fingerprint, read_only, small_store

from tierstore.cli import doctor
from tierstore.cli.doctor import CHECKS, rank_exchanges
from tierstore.store import ParameterStore, RecordSchema, StoreConfig, StripeConfig


def test_tables(tmp_path: Path) -> None:
    shown = done("doctor", "--dir", tmp_path).stdout
    for name in CHECKS:
        assert f"\n{name} " in shown
    assert str(tmp_path) in shown
    assert list(tmp_path.iterdir()) == []


def test_json(tmp_path: Path) -> None:
    found = object_of("doctor", "--dir", tmp_path, "--capability", "io_uring=off")
    capabilities = {entry["name"]: entry for entry in found["capabilities"]}
    assert list(capabilities) == list(CHECKS)
    assert capabilities["io_uring"] == {
        "name": "io_uring",
        "setting": "off",
        "effective": "off",
        "backend": "threads",
        "reason": "switched off",
    }
    assert all(entry["effective"] in ("off", "on") and entry["reason"] for entry in capabilities.values())
    assert found["cores"] >= 1
    assert found["disk_free_bytes"] <= found["disk_total_bytes"]
    assert found["torch_version"]
    assert found["rank_exchanges"].startswith("Gloo between CPUs")
    assert ("NCCL" in found["rank_exchanges"]) == (torch.cuda.is_available() and dist.is_nccl_available())


def test_what_ranks_exchange_through(monkeypatch: pytest.MonkeyPatch) -> None:
    unmeasured = "run tierstore bench machine to measure message times"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for devices, nccl in ((1, "NCCL between 1 CUDA device"), (2, "NCCL between 2 CUDA devices")):
        monkeypatch.setattr(doctor, "device_count", lambda devices=devices: devices)
        assert rank_exchanges() == f"Gloo between CPUs, {nccl}; {unmeasured}"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert rank_exchanges() == f"Gloo between CPUs; {unmeasured}"
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert rank_exchanges() == "none: this torch has no Gloo, which multi-rank runs need"


def test_on_fails_where_it_is_lacking(tmp_path: Path) -> None:
    found = object_of("doctor", "--dir", tmp_path)
    lacking = [entry for entry in found["capabilities"] if entry["effective"] == "off"]
    if not lacking:
        pytest.skip("this machine has every capability")
    name = lacking[0]["name"]
    result = invoke("doctor", "--dir", tmp_path, "--capability", f"{name}=on")
    assert (result.exit_code, result.stdout) == (2, "")
    expected = f"{name} is set to on, but this machine lacks it: {lacking[0]['reason']}"
    assert result.stderr == f"tierstore: error: {expected}\n"


def test_a_read_only_volume_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    small_store(disk / "s").close()
    monkeypatch.chdir(disk)
    with read_only(disk):
        before = fingerprint(disk)
        for command in ("doctor --dir . --store s", "verify s", "gc s --dry-run"):
            assert done(*command.split()).stderr == ""
        assert fingerprint(disk) == before


def test_the_drives_of_a_store(tmp_path: Path) -> None:
    further = StripeConfig(directories=(tmp_path / "b",))
    config = StoreConfig(host_budget=1 << 20, stripe=further)
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", 1000)], config) as store:
        for key in ("x", "y"):
            store.register(key, "expert")
        store.commit()
        held = invoke("doctor", "--store", tmp_path / "store")
        assert held.exit_code == 2
        assert f"open in another process (pid {os.getpid()})" in held.stderr
    arguments = ("doctor", "--dir", tmp_path, "--store", tmp_path / "store")
    own, other = object_of(*arguments)["drives"]
    # One record each: 4,000 bytes of weights and twice as many of moments, each padded to a page.
    assert own["used_bytes"] == other["used_bytes"] == 3 * 4096
    assert own["reserved_bytes"] >= 2 * 3 * 4096
    assert (own["share_ratio"], other["path"]) == (0.5, str(tmp_path / "b"))
    assert own["disks"] == other["disks"]
    (tmp_path / "b").rename(tmp_path / "c")
    shown = invoke(*arguments).stdout
    assert f"{tmp_path / 'b'}" in shown
    assert "MISSING" in shown
    assert "not measured" in shown
