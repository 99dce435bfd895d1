"""Builds the simulated device: torch's own headers and g++, once for each version of its sources and of torch."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

SOURCES = ("device", "module")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")


def build() -> Path:
    """The directory of ``_simgpu.so``, below ``build/``. Skips the test where there is no compiler for it, and where
    torch is another than ``constraints.txt`` has and its headers have changed.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the simulated device is built with g++, and there is none")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        pytest.skip("the simulated device is built with Python's headers, and there are none")
    directory = ROOT / "build" / f"simgpu-{_version()}"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "_simgpu.so").exists():
            _compile(compiler, directory)
    return directory


def _version() -> str:
    found = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")]):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _compile(compiler: str, directory: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    includes = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    compiling = {
        name: subprocess.Popen(
            [compiler, *_FLAGS, *includes, "-c", HERE / f"{name}.cpp", "-o", directory / f"{name}.o"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in SOURCES
    }
    errors = {name: process.communicate()[1] for name, process in compiling.items()}
    if failed := [name for name, process in compiling.items() if process.returncode]:
        said = "\n".join(errors[name] for name in failed)
        if f"torch=={torch.__version__.split('+')[0]}" not in (ROOT / "constraints.txt").read_text():
            pytest.skip(f"the simulated device does not build with torch {torch.__version__}: {said[:500]}")
        raise AssertionError(f"the simulated device does not build: {said[:5000]}")
    (libraries,) = library_paths()
    unfinished = directory / "unfinished.so"
    objects = [directory / f"{name}.o" for name in SOURCES]
    subprocess.run(
        [compiler, "-shared", *objects, "-o", unfinished, f"-L{libraries}"]
        + [f"-l{name}" for name in ("torch", "torch_cpu", "torch_python", "c10")],
        check=True,
    )
    for each in objects:
        each.unlink()
    os.replace(unfinished, directory / "_simgpu.so")
