"""Disks under directories and their health, in synthetic /sys and /dev trees and on this machine."""

import json
import os
from pathlib import Path

import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.devices import (
    Disk,
    Health,
    disk_health,
    disks_under,
    parse_health_page,
    parse_nvme,
    parse_smartctl,
)


class Tree:
    """A /sys of block devices, and a mountinfo, for the device number of ``directory``."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self.directory = root
        number = root.stat().st_dev
        self.number = f"{os.major(number)}:{os.minor(number)}"
        for path in (self.proc / "self", self.sys / "dev/block", self.sys / "class/block"):
            path.mkdir(parents=True)
        (self.proc / "self/mountinfo").write_text("")

    def disk(self, place: str, *, sectors: int, rotational: str = "0", model: str = "") -> Path:
        entry = self.sys / "devices" / place
        (entry / "queue").mkdir(parents=True)
        (entry / "queue/rotational").write_text(f"{rotational}\n")
        (entry / "size").write_text(f"{sectors}\n")
        if model:
            (entry / "device").mkdir()
            (entry / "device/model").write_text(f"{model}\n")
        (self.sys / "class/block" / entry.name).symlink_to(entry)
        return entry

    def is_here(self, entry: Path) -> None:
        (self.sys / "dev/block" / self.number).symlink_to(entry)

    def found(self) -> list[Disk]:
        return disks_under(self.directory, proc=self.proc, sys=self.sys)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_partition_of_an_nvme_disk(tree: Tree) -> None:
    entry = tree.disk("pci0/nvme/nvme0/nvme0n1", sectors=2048, model="Fast  Drive 9000   ")
    (entry / "nvme0n1p2").mkdir()
    (entry / "nvme0n1p2/partition").write_text("2\n")
    tree.is_here(entry / "nvme0n1p2")
    (found,) = tree.found()
    assert found == Disk(
        name="nvme0n1",
        through=("nvme0n1p2",),
        model="Fast Drive 9000",
        rotational=False,
        size_bytes=1 << 20,
        bus="nvme",
    )
    assert found.kind == "NVMe SSD"


def test_a_volume_on_two_disks(tree: Tree) -> None:
    """dm-0 over a RAID of sda and a partition of sdb."""
    sda = tree.disk("pci0/ata1/sda", sectors=1, rotational="1")
    sdb = tree.disk("pci0/ata2/sdb", sectors=2)
    (sdb / "sdb1").mkdir()
    (sdb / "sdb1/partition").write_text("1\n")
    raid, volume = tree.disk("virtual/block/md0", sectors=3), tree.disk("virtual/block/dm-0", sectors=3)
    for entry, below in [(raid, (sda, sdb / "sdb1")), (volume, (raid,))]:
        (entry / "slaves").mkdir()
        for slave in below:
            (entry / "slaves" / slave.name).symlink_to(slave)
    tree.is_here(volume)
    one, other = tree.found()
    assert (one.name, one.through, one.kind) == ("sda", ("dm-0", "md0"), "hard disk")
    assert (other.name, other.through, other.kind) == ("sdb", ("dm-0", "md0", "sdb1"), "SSD")


def test_a_file_system_with_a_number_of_its_own(tree: Tree) -> None:
    """As btrfs has: the mount table says what was mounted, here through a link with a blank in its name."""
    tree.disk("pci0/virtio3/block/vdb", sectors=8)
    line = f"36 27 {tree.number} / /data rw,relatime shared:1 - btrfs /dev/no\\040where/../vdb rw\n"
    (tree.proc / "self/mountinfo").write_text(f"21 27 9:99 / /x rw - ext4 /dev/vdz rw\n{line}")
    (found,) = tree.found()
    assert (found.name, found.kind, found.bus) == ("vdb", "virtual disk", "virtio")


def test_no_block_device(tree: Tree) -> None:
    (tree.proc / "self/mountinfo").write_text(f"21 27 {tree.number} / /run rw - tmpfs tmpfs rw\n")
    assert tree.found() == []


def test_a_loop_device_is_on_the_disk_of_its_file(tree: Tree) -> None:
    """The file is on another file system, here that of /proc, which is made out to have a disk."""
    below = tree.disk("pci0/usb1/sdc", sectors=4)
    loop = tree.disk("virtual/block/loop5", sectors=4)
    (loop / "loop").mkdir()
    (loop / "loop/backing_file").write_text("/proc/self/status\n")
    tree.is_here(loop)
    number = os.stat("/proc/self/status").st_dev
    (tree.sys / f"dev/block/{os.major(number)}:{os.minor(number)}").symlink_to(below)
    (found,) = tree.found()
    assert (found.name, found.through, found.bus) == ("sdc", ("loop5",), "usb")


def test_this_machine(tmp_path: Path) -> None:
    """Whatever there is: whole disks, never a partition."""
    for disk in disks_under(tmp_path):
        assert not (Path("/sys/class/block") / disk.name / "partition").exists()
        assert disk.size_bytes >= 0
        assert disk.kind
    with pytest.raises(FileNotFoundError):
        disks_under(tmp_path / "nowhere")


def page(**fields: int) -> bytes:
    """By NVM Express Base Specification 2.0, figure 207."""
    places = {
        "critical_warning": (0, 1),
        "temperature": (1, 2),
        "available_spare": (3, 1),
        "spare_threshold": (4, 1),
        "percentage_used": (5, 1),
        "data_units_read": (32, 16),
        "data_units_written": (48, 16),
        "power_on_hours": (128, 16),
        "media_errors": (160, 16),
    }
    out = bytearray(512)
    for name, value in fields.items():
        offset, nbytes = places[name]
        out[offset : offset + nbytes] = value.to_bytes(nbytes, "little")
    return bytes(out)


def test_a_page_by_hand() -> None:
    """311 K; 7% used; 2,000,000 units of 512,000 bytes are 1.024 TB."""
    raw = page(
        temperature=311,
        available_spare=100,
        spare_threshold=10,
        percentage_used=7,
        data_units_read=5,
        data_units_written=2_000_000,
        power_on_hours=900,
        media_errors=3,
    )
    found = parse_health_page(raw)
    assert found == Health(
        used_percent=7,
        spare_percent=100,
        written_bytes=1_024_000_000_000,
        media_errors=3,
        temperature_celsius=38,
    )
    assert str(found) == "7% of its endurance used, 100% spare, 1.0 TB written, 3 media errors, 38 °C"


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        (0b000001, "its spare capacity is below the threshold"),
        (0b000010, "its temperature is out of range"),
        (0b000100, "its reliability is degraded by media errors"),
        (0b001000, "it has gone read-only"),
        (0b010000, "the backup of its volatile memory has failed"),
        (0b100000, "its persistent memory region is read-only or unreliable"),
        (0b1000000, "critical warning 0x40"),
    ],
)
def test_each_critical_warning(bits: int, said: str) -> None:
    found = parse_health_page(page(critical_warning=bits, available_spare=3))
    assert found.warnings == (said,)
    assert str(found).startswith(f"WARNING: {said}, ")
    assert parse_nvme(json.dumps({"critical_warning": bits})).warnings == (said,)


def test_several_warnings_and_a_short_page() -> None:
    assert len(parse_health_page(page(critical_warning=0b1001)).warnings) == 2
    with pytest.raises(ValueError, match="has 512 bytes, not 511"):
        parse_health_page(bytes(511))


@settings(max_examples=share(40))
@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**128 - 1), st.integers(0, 2**128 - 1))
def test_a_page_and_the_tools_agree(used: int, spare: int, units: int, errors: int) -> None:
    raw = page(percentage_used=used, available_spare=spare, data_units_written=units, media_errors=errors)
    direct = parse_health_page(raw)
    log = {
        "critical_warning": 0,
        "percentage_used": used,
        "available_spare": spare,
        "data_units_written": units,
        "media_errors": errors,
    }
    smart = parse_smartctl(json.dumps({"nvme_smart_health_information_log": log}))
    printed = {
        "critical_warning": 0,
        "percent_used": used,
        "avail_spare": spare,
        "data_units_written": f"{units:,}",
        "media_errors": errors,
    }
    tool = parse_nvme(json.dumps(printed))
    for other in (smart, tool):
        assert (other.used_percent, other.spare_percent) == (direct.used_percent, direct.spare_percent)
        assert (other.written_bytes, other.media_errors) == (direct.written_bytes, direct.media_errors)


def test_a_sata_ssd() -> None:
    text = json.dumps(
        {
            "smart_status": {"passed": True},
            "logical_block_size": 512,
            "temperature": {"current": 31},
            "ata_smart_attributes": {
                "table": [
                    {"id": 177, "value": 96, "raw": {"value": 52}},
                    {"id": 241, "value": 99, "raw": {"value": 4_000_000_000}},
                ]
            },
        }
    )
    found = parse_smartctl(text)
    assert str(found) == "4% of its endurance used, 2.0 TB written, 31 °C"
    failing = parse_smartctl(json.dumps({"smart_status": {"passed": False}}))
    assert str(failing) == "WARNING: it says that it is failing"
    assert str(parse_smartctl(json.dumps({"smart_status": {"passed": True}}))) == "passed"


def test_what_is_no_health_is_an_error() -> None:
    refused = {"smartctl": {"messages": [{"string": "Permission denied"}]}}
    with pytest.raises(ValueError, match="Permission denied"):
        parse_smartctl(json.dumps(refused))
    for parse in (parse_smartctl, parse_nvme):
        with pytest.raises(ValueError, match="JSON object, got list"):
            parse("[]")
        with pytest.raises(ValueError, match="Expecting value"):
            parse("")
    with pytest.raises(ValueError, match="not a health log"):
        parse_nvme("{}")


def disk(name: str, bus: str) -> Disk:
    return Disk(name=name, through=(), model="", rotational=False, size_bytes=0, bus=bus)


def test_who_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert str(disk_health(disk("vda", "virtio"))) == "not offered by virtio"
    assert str(disk_health(disk("sda", "ata"))) == "not known: smartctl is not installed"
    none = disk_health(disk("nvme7n1", "nvme"), sys=tmp_path, dev=tmp_path)
    assert none.reason.startswith("not known: ")
    assert str(tmp_path / "nvme7") in none.reason
    (tmp_path / "nvme7").touch()  # there, and no controller
    assert "ioctl" in disk_health(disk("nvme7n1", "nvme"), sys=tmp_path, dev=tmp_path).reason


@pytest.mark.parametrize(
    "said",
    [
        {"smart_status": "passed"},
        {"smart_status": {"passed": True}, "ata_smart_attributes": {"table": [{"name": "no number"}]}},
        {"smart_status": {"passed": True}, "temperature": 31},
        {"nvme_smart_health_information_log": {"critical_warning": None}},
    ],
)
def test_a_tool_of_another_time_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, object]
) -> None:
    (tmp_path / "smartctl").write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    (tmp_path / "smartctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = disk_health(disk("sda", "ata"))
    assert found.reason.startswith("not known: unknown output")


def test_the_tools_are_asked_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A multipath namespace; a controller that may not be opened; smartctl that may not either; nvme that may."""
    tools, subsystem = tmp_path / "bin", tmp_path / "devices/nvme-subsys0"
    (subsystem / "nvme3").mkdir(parents=True)
    (tmp_path / "class/block/nvme0n1").mkdir(parents=True)
    (tmp_path / "class/block/nvme0n1/device").symlink_to(subsystem)
    tools.mkdir()
    for name, script in {
        "smartctl": 'echo \'{"smartctl": {"messages": [{"string": "denied"}]}}\'; exit 2',
        "nvme": 'echo "{\\"critical_warning\\": 8, \\"percent_used\\": 101, \\"model\\": \\"$4\\"}"',
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    found = disk_health(disk("nvme0n1", "nvme"), sys=tmp_path, dev=tmp_path / "none")
    assert found == Health(warnings=("it has gone read-only",), used_percent=101)
