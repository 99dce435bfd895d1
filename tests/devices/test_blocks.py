"""Disks under directories, in made-up /sys trees and on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierstore.devices import Disk, disks_under


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
