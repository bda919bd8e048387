"""Builds the stub CANN for the torch_npu wheel of the running interpreter's environment."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

from tests.stubcann.symbols import assembler, symbols_of, wanted_by

SOURCES = Path(__file__).parent
PACKAGES_BESIDE = SOURCES / "path"
"""xlite and vllm_ascend, as far as the runner needs them."""
BUILDS = SOURCES.parents[1] / "build" / "stubcann"
FLAGS = ("-O1", "-g", "-fPIC", "-shared", "-std=c++17", "-Wall", "-fvisibility=hidden")
PACKAGES = Path(sysconfig.get_path("purelib"))
HOW_TO_INSTALL = "python -m pip install -c constraints.txt -e '.[test,oracle]'"


class StubCannError(Exception):
    """The stub cannot be built here."""


def environment() -> dict[str, str]:
    """The process environment under which ``import torch_npu`` finds the stub, and ``import xlite`` something.

    Builds the stub first if need be.

    Raises:
        StubCannError: torch_npu or a compiler is missing, or the build fails.
    """
    added = {"LD_LIBRARY_PATH": libraries_folder(), "PYTHONPATH": PACKAGES_BESIDE}
    return os.environ | {
        name: os.pathsep.join([str(path), *filter(None, [os.environ.get(name)])]) for name, path in added.items()
    }


def runs_on_the_stub() -> bool:
    """Whether this process runs on the stub."""
    return str(BUILDS) in os.environ.get("LD_LIBRARY_PATH", "")


def libraries_folder() -> Path:
    """The folder of the built libraries, one for each state of the sources and each wheel; builds them if need be.

    Raises:
        StubCannError: torch_npu or a compiler is missing, or the build fails.
    """
    if not (PACKAGES / "torch_npu" / "lib").is_dir():
        raise StubCannError(f"torch_npu is not installed in {PACKAGES}; {HOW_TO_INSTALL}")
    missing = [tool for tool in ("g++", "nm", "readelf", "strings") if shutil.which(tool) is None]
    if missing:
        raise StubCannError(f"to build the stub CANN, install {', '.join(missing)} (packages g++ and binutils)")
    folder = BUILDS / _key()
    if not folder.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as scratch:
            unfinished = Path(scratch) / "lib"
            unfinished.mkdir()
            _build(unfinished)
            try:
                unfinished.rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return folder


def _key() -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.*")):
        if source.suffix in (".cpp", ".h", ".py"):
            digest.update(source.read_bytes())
    for package in ("torch", "torch_npu"):
        digest.update(next(iter(metadata.distributions(name=package, path=[str(PACKAGES)]))).version.encode())
    return digest.hexdigest()[:16]


def _build(folder: Path) -> None:
    torch_npu = PACKAGES / "torch_npu"
    headers = (f"-I{torch_npu}/include", f"-I{torch_npu}/include/third_party/hccl/inc")
    # dlsym on a library also searches what that library needs, so each of the others leans on libascendcl.so.
    leaning = ("-Wl,--no-as-needed", f"-L{folder}", "-lascendcl")
    wanted = wanted_by(torch_npu, PACKAGES / "torch")

    def compile_library(name: str, *inputs: str, flags: tuple[str, ...] = leaning) -> None:
        command = ["g++", *FLAGS, *headers, f"-Wl,-soname,{name}", "-o", str(folder / name), *inputs, *flags]
        result = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True)
        if result.returncode:
            raise StubCannError(f"{' '.join(command)}\n{result.stderr}")

    def assemble(name: str, symbols: set[str]) -> str:
        path = folder.parent / f"{name}.S"
        path.write_text(assembler(symbols))
        return str(path)

    compile_library("libascendcl.so", "memory.cpp", "runtime.cpp", flags=("-lpthread",))
    compile_library("libhccl.so", "hccl.cpp")
    implemented = symbols_of(folder / "libascendcl.so", "--defined-only")
    implemented |= symbols_of(folder / "libhccl.so", "--defined-only")
    of_atb = {symbol for symbol in wanted.linked if "3atb" in symbol}
    compile_library("libatb.so", assemble("atb", of_atb))
    compile_library("libgraph.so", assemble("rest", wanted.linked - of_atb - implemented))
    compile_library("libopapi.so", assemble("operators", wanted.operators))
    for name in wanted.libraries - {path.name for path in folder.iterdir()}:
        compile_library(name, assemble("empty", set()))
