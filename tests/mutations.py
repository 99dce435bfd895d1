"""Proves that each fault test guards something: takes the code away that it guards, and sees the test fail.

Opt-in, for it takes minutes: ``python tests/mutations.py [--native BUILD-COMMAND] [WORD..]`` from the repository's
root. Each mutation is made in a copy of the tree; those of native code are made in the checkout, built with the
command given, and taken back. It prints a line for each, and ends with 1 if one was not noticed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORE = "tests/faults/test_store_faults.py::"
PROCESSES = "tests/faults/test_processes.py::"
POWER = "tests/faults/test_power_loss.py::"
CRASH = "tests/store/test_crash_replay.py::"
LEASE = "tests/store/disk/test_lease.py::"
TRAIN = "tests/faults/test_train_faults.py::"


@dataclass(frozen=True)
class Mutation:
    """In ``file``, ``search`` (which is there once) becomes ``replace``; ``test`` must then fail, and ``others`` too."""

    name: str
    file: str
    search: str
    replace: str
    test: str
    others: tuple[str, ...] = ()

    @property
    def tests(self) -> tuple[str, ...]:
        return (self.test, *self.others)

    @property
    def native(self) -> bool:
        return self.file.startswith("native/")

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        if text.count(self.search) != 1:
            raise SystemExit(
                f"{self.name}: {self.file}: expected once, found {text.count(self.search)} times"
            )
        path.write_text(text.replace(self.search, self.replace))


MUTATIONS = [
    Mutation(
        "failed transfers are not explained",
        "tierstore/store/committing.py",
        "            if offset is None:\n",
        "            if True:\n",
        STORE + "test_a_failed_read_names_key_section_and_file[weight-threads]",
    ),
    Mutation(
        "a failed commit does not poison",
        "tierstore/store/committing.py",
        "            self.poison(what, error)\n",
        "",
        STORE + "test_a_failed_write_or_sync_poisons[s/index/data.mdb-write-5-threads]",
    ),
    Mutation(
        "what failed in an update is committed",
        "tierstore/store/committing.py",
        "            self._failures.wait([*self.writes, *self._syncs])\n",
        "",
        STORE + "test_what_depends_on_a_failed_read_is_never_committed[threads]",
    ),
    Mutation(
        "a failed sync of a directory is ignored",
        "tierstore/store/disk/home.py",
        "        raise OSError(error.errno, error.strerror, str(directory)) from error\n",
        "        del error\n",
        STORE + "test_a_failed_sync_of_a_directory_poisons",
    ),
    Mutation(
        "a full disk is found out in the middle of an update",
        "tierstore/store/core.py",
        "        if (flags & np.uint16(_DIRTIES)).any():\n",
        "        if False:\n",
        STORE + "test_no_space_for_a_reservation_changes_nothing[s/extents/expert.moments]",
    ),
    Mutation(
        "a lease cannot be released where its drive is gone",
        "tierstore/store/disk/lease.py",
        "            with contextlib.suppress(OSError):\n                os.close(fd)\n",
        "            os.close(fd)\n",
        STORE + "test_a_drive_that_is_pulled_out_stops_the_run[write-s/extents/*-commit-threads]",
    ),
    Mutation(
        "an index is not read before it is mapped",
        "tierstore/store/index/database.py",
        "        check_pages(self._data)\n",
        "",
        STORE + "test_an_index_that_cannot_be_read_is_an_error_of_its_drive[read]",
    ),
    Mutation(
        "pages of an index are not checked",
        "tierstore/store/index/database.py",
        "        if own != number or kind != expected or not _HEAD.size < lower <= upper <= _PAGE or lower % 2:\n",
        "        if False:\n",
        "tests/store/index/test_pages.py::test_damaged_pages_are_refused_and_never_end_the_process",
    ),
    Mutation(
        "entries of an index are not checked",
        "tierstore/store/index/database.py",
        "            self._check_entries()\n",
        "",
        STORE + "test_a_bit_flipped_as_the_index_is_written_is_found[OpenAt.LAST]",
        ("tests/store/index/test_pages.py::test_one_flipped_bit_is_found_or_means_nothing",),
    ),
    Mutation(
        "extents are not synced",
        "tierstore/store/committing.py",
        "            self._syncs += extents.syncs(self._unfinished(self.writes))\n",
        "",
        POWER + "test_power_cuts[plain]",
        (CRASH + "test_a_thousand_crash_states",),
    ),
    Mutation(
        "extents of the first directory alone are synced",
        "tierstore/store/disk/store_extents.py",
        "        tickets = [extent.sync(waits) for extent in self._committed]\n",
        "        tickets = [extent.sync(waits) for extent in self._committed if not extent.directory]\n",
        POWER + "test_power_cuts[spread]",
        (CRASH + "test_crash_states_of_two_drives",),
    ),
    Mutation(
        "no copy on write",
        "tierstore/store/index/live.py",
        "        if slot is None or slot.extent.shared(slot.number):\n",
        "        if slot is None:\n",
        POWER + "test_power_cuts[plain]",
        (
            POWER + "test_power_cuts[retained]",
            CRASH + "test_a_thousand_crash_states",
            "tests/store/test_kill_storm.py::test_kill_storm",
        ),
    ),
    Mutation(
        "what was undone keeps its snapshots",
        "tierstore/store/index/database.py",
        "            for name in {snapshot, *later}:\n",
        "            for name in {snapshot}:\n",
        POWER + "test_power_cuts[rolled_back]",
    ),
    Mutation(
        "gc takes slots of snapshots for garbage",
        "tierstore/store/reading.py",
        "index.read_commit(name).records for name in (None, *index.snapshots())",
        "index.read_commit(name).records for name in (None,)",
        POWER + "test_power_cuts[collected]",
    ),
    Mutation(
        "slots are free before the commit that leaves them is durable",
        "tierstore/store/committing.py",
        '        parts.engine.log_mark(f"index {generation}")\n',
        '        parts.engine.log_mark(f"index {generation}")\n'
        "        before = live.table.rows[[n for n in changed.numbers if n < len(live.table)]]\n"
        "        live.release(before)\n"
        "        self._discard()\n"
        "        live.retain(before)\n"
        "        parts.extents.end_discards()\n",
        POWER + "test_power_cuts[discarding]",
        ("tests/store/disk/test_discard.py::test_holes_in_every_crash_state",),
    ),
    Mutation(
        "a slot may be written while its hole is being made",
        "tierstore/store/disk/extents.py",
        "        self.end_punches()\n        missing =",
        "        missing =",
        "tests/store/disk/test_discard.py::test_a_slot_is_not_used_before_its_hole_is_made",
    ),
    Mutation(
        "the lease of a new store has no durable name",
        "tierstore/store/opening.py",
        "        home.sync_names()\n",
        "",
        POWER + "test_power_cuts[created]",
        (POWER + "test_power_cuts[spread]",),
    ),
    Mutation(
        "the lease of a new directory has no durable name",
        "tierstore/store/disk/drives.py",
        "        fsync_directory(path)\n        remove_content(path)\n",
        "        remove_content(path)\n",
        POWER + "test_power_cuts[reweighed]",
    ),
    Mutation(
        "the file that says whose directories these are is written twice",
        "tierstore/store/disk/home.py",
        "        if self._announced != directories:\n",
        "        if True:\n",
        POWER + "test_power_cuts[spread]",
    ),
    Mutation(
        "the file that says whose directories these are goes before they are recovered",
        "tierstore/store/opening.py",
        "        drives = Drives.create(home, config.stripe, abandoned)\n",
        "        remove_content(directory)\n        drives = Drives.create(home, config.stripe, abandoned)\n",
        POWER + "test_power_cuts_after_a_power_cut[spread]",
    ),
    Mutation(
        "the identity of a directory has no durable name",
        "tierstore/store/disk/drives.py",
        '    (path / f"{IDENTITY}.new").rename(path / IDENTITY)\n    fsync_directory(path)\n',
        '    (path / f"{IDENTITY}.new").rename(path / IDENTITY)\n',
        POWER + "test_power_cuts[spread]",
    ),
    Mutation(
        "a creation that fails is not taken back",
        "tierstore/store/disk/home.py",
        "            remove_unfinished(self.directory)\n",
        "            pass\n",
        STORE + "test_a_failed_rename_or_sync_at_creation_leaves_no_store",
    ),
    Mutation(
        "an opening that fails keeps its lease",
        "tierstore/store/opening.py",
        "        home.lease = lease = stack.enter_context(DirectoryLease(directory, access=access))\n",
        "        home.lease = lease = DirectoryLease(directory, access=access)\n",
        PROCESSES + "test_memory_that_is_not_to_be_had_is_one_clear_error",
    ),
    Mutation(
        "names are not synced before the identity says that they are there",
        "tierstore/store/disk/home.py",
        '        fsync_directory(self.directory / "extents")\n        fsync_directory(self.directory)\n',
        "",
        POWER + "test_power_cuts[created]",
    ),
    Mutation(
        "files that have grown are not synced by their directory",
        "tierstore/store/committing.py",
        '                fsync_directory(self._parts.drives[number].path / "extents")\n',
        "                pass\n",
        STORE + "test_a_failed_sync_of_a_directory_poisons",
    ),
    Mutation(
        "a prepared commit keeps nothing",
        "tierstore/store/disk/extents.py",
        "        for slot in slots[references[slots] == 0].tolist():\n",
        "        for slot in slots.tolist():\n",
        POWER + "test_a_prepared_commit_can_be_undone_after_a_power_cut",
    ),
    Mutation(
        "a fetch does not wait for its reads",
        "tierstore/store/parameter_store.py",
        "            self.core.wait(lease.tickets)\n",
        "            pass\n",
        STORE + "test_delays_change_times_alone[threads]",
    ),
    Mutation(
        "a child may use its parent's store",
        "tierstore/store/committing.py",
        "        return os.getpid() != self._owner\n",
        "        return False\n",
        PROCESSES + "test_children_can_neither_use_nor_harm_a_store",
    ),
    Mutation(
        "a lease is not locked",
        "tierstore/store/disk/lease.py",
        "        fcntl.flock(fd, kind | fcntl.LOCK_NB)\n",
        "        pass\n",
        PROCESSES + "test_of_two_that_race_one_wins[open]",
        (PROCESSES + "test_of_two_that_race_one_wins[create]",),
    ),
    Mutation(
        "files of a store are not compared with their names before a commit",
        "tierstore/store/committing.py",
        "        parts.drives.check()",
        "",
        LEASE + "test_no_commit_is_acknowledged_once_a_file_of_the_store_has_gone[False]",
        (LEASE + "test_where_directories_cannot_be_locked_the_lease_is_compared",),
    ),
    Mutation(
        "the ring does not keep the lock of a directory",
        "tierstore/store/disk/lease.py",
        "(self._fd, self._directory_fd) if",
        "(self._fd,) if",
        LEASE + "test_the_ring_keeps_every_lock_of_a_writer[False]",
    ),
    Mutation(
        "the age of snapshots is of the clock",
        "tierstore/store/index/database.py",
        "key=lambda item: item[1]))",
        'key=lambda item: __import__("time").time()))',
        PROCESSES + "test_a_clock_that_jumps_changes_nothing",
    ),
    Mutation(
        "a closed lease keeps its descriptor",
        "tierstore/store/disk/lease.py",
        "                os.close(fd)\n        self._kept.clear()\n",
        "                pass\n        self._kept.clear()\n",
        PROCESSES + "test_opening_a_thousand_times_leaves_nothing[threads-1000]",
    ),
    Mutation(
        "the host budget is no limit",
        "tierstore/store/opening.py",
        "    return max(nbytes // frame, 1), frame\n",
        "    return max(8 * nbytes // frame, 1), frame\n",
        PROCESSES + "test_a_store_many_times_its_memory_is_trained_within_a_cgroup",
    ),
    Mutation(
        "errors of the operating system have no line",
        "tierstore/cli/main.py",
        "        except (click.ClickException, TierstoreError, OSError) as error:\n",
        "        except (click.ClickException, TierstoreError) as error:\n",
        TRAIN + "test_a_run_stops_with_one_line_and_resumes[uring-read]",
    ),
    Mutation(
        "checksums are not compared",
        "native/engine/engine.cpp",
        "            if (!result.failure && operation.transfer.crcs) {\n",
        "            if (false) {\n",
        STORE + "test_a_bit_flipped_on_the_way_is_never_trained_on[0-threads]",
        (
            STORE + "test_a_bit_flipped_on_the_way_is_never_trained_on[0-uring]",
            STORE + "test_a_bit_flipped_on_the_way_is_never_trained_on[0-pmem]",
            STORE + "test_a_bit_flipped_as_it_is_written_is_found_when_it_is_read[threads]",
            STORE + "test_a_write_that_was_lost_is_found_when_it_is_read[threads]",
        ),
    ),
    Mutation(
        "pages of a mapping are not touched beforehand",
        "native/io/mapping.cpp",
        "    if (rc == 0 || errno == EINVAL) return 0;\n",
        "    return 0;\n",
        STORE + "test_a_failed_read_names_key_section_and_file[weight-pmem]",
        (
            STORE + "test_a_file_that_is_cut_short_is_an_error_and_no_signal[pmem]",
            "tests/store/test_mapped.py::test_a_file_that_was_cut_short_is_an_error_and_not_a_signal",
        ),
    ),
    Mutation(
        "weights in a mapped file are used unchecked",
        "tierstore/prefetch/walking.py",
        "                self.wait(self._ready(record), layer, Tier.NVME, Cause.DEMAND_READ)\n",
        "                pass\n",
        "tests/serve/test_broken_reads.py::test_a_damaged_expert_in_a_mapped_file",
    ),
    Mutation(
        "a short transfer is taken for a whole one",
        "native/io/request_queue.cpp",
        "    if (done_ == nbytes_) return Progress::Done;\n    move_on",
        "    if (done_ > 0) return Progress::Done;\n    move_on",
        STORE + "test_short_transfers_are_continued[threads]",
        (STORE + "test_short_transfers_are_continued[uring]",),
    ),
    Mutation(
        "a child that ends waits for its parent's threads",
        "native/engine/engine.cpp",
        "    if (getpid() != owner_) return;\n",
        "",
        PROCESSES + "test_children_can_neither_use_nor_harm_a_store",
    ),
]


def passing(root: Path, tests: tuple[str, ...]) -> list[str]:
    """Those of ``tests`` that do not fail in the tree at ``root``; a test that is not found is no proof."""
    return [test for test in tests if not fails(root, test)]


def fails(root: Path, test: str) -> bool:
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=thorough",
    ]
    command.append(str(root / test))
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode in (2, 4, 5):
        raise SystemExit(f"{test}: not run:\n{done.stdout}\n{done.stderr}")
    return done.returncode != 0


def try_python(mutation: Mutation) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name in ("tierstore", "tests", "docs", "pyproject.toml"):
            source = ROOT / name
            shutil.copytree(source, root / name) if source.is_dir() else shutil.copy(source, root)
        mutation.apply(root)
        return passing(root, mutation.tests)


def try_native(mutation: Mutation, build: str) -> list[str]:
    path = ROOT / mutation.file
    whole = path.read_bytes()
    try:
        mutation.apply(ROOT)
        subprocess.run(build, shell=True, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return passing(ROOT, mutation.tests)
    finally:
        path.write_bytes(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutations whose names have one of these words")
    parser.add_argument("--native", metavar="COMMAND", help="builds the extension in the checkout")
    options = parser.parse_args()
    unnoticed, rebuilt = 0, False
    for mutation in MUTATIONS:
        if options.words and not any(word in mutation.name for word in options.words):
            continue
        if mutation.native and not options.native:
            print(f"left out   {mutation.name} (native)", flush=True)
            continue
        rebuilt |= mutation.native
        blind = try_native(mutation, options.native) if mutation.native else try_python(mutation)
        unnoticed += len(blind)
        for test in mutation.tests:
            print(f"{'UNNOTICED' if test in blind else 'noticed  '}  {mutation.name}: {test}", flush=True)
    if rebuilt:
        subprocess.run(options.native, shell=True, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    sys.exit(1 if unnoticed else 0)


if __name__ == "__main__":
    main()
