"""Which symbols the torch_npu wheel wants of CANN, and assembler that defines those that do nothing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

OF_CANN = re.compile(r"acl[a-z]*[A-Z]|Hccl|Msprof|rt[A-Z]|_ZN3atb|_ZNK3atb|_ZTI.*3atb")
OF_THE_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so|ld-linux")
OPERATOR = re.compile(r"aclnn[A-Z]\w+")
OPERATOR_ARGUMENTS = ("Tensor", "TensorList", "Scalar", "ScalarList", "IntArray", "FloatArray", "BoolArray")


@dataclass(frozen=True)
class Wanted:
    """What a wheel needs.

    Attributes:
        linked: Symbols that its libraries are linked against, and torch does not define.
        operators: Operator entry points that it looks up by name when it needs them, and the constructors and
            destructors of their arguments.
        libraries: Names of the CANN libraries that it is linked against.
    """

    linked: set[str]
    operators: set[str]
    libraries: set[str]


def wanted_by(torch_npu: Path, torch: Path) -> Wanted:
    """Read the installed packages' libraries."""
    own = sorted(torch_npu.glob("lib/*.so")) + sorted(torch_npu.glob("_C*.so"))
    torchs = sorted(torch.glob("lib/*.so*"))
    undefined = set[str]().union(*(symbols_of(library, "--undefined-only") for library in own))
    defined = set[str]().union(*(symbols_of(library, "--defined-only") for library in own + torchs))
    libraries = set[str]().union(*(_needed_by(library) for library in own))
    found = {library.name for library in own + torchs}
    names = _run("strings", "-n", "6", str(torch_npu / "lib" / "libtorch_npu.so")).split()
    operators = {name.removesuffix("GetWorkspaceSize") for name in names if OPERATOR.fullmatch(name)}
    return Wanted(
        linked={symbol for symbol in undefined - defined if OF_CANN.match(symbol)},
        operators=operators
        | {f"{name}GetWorkspaceSize" for name in operators}
        | {f"acl{verb}{argument}" for verb in ("Create", "Destroy") for argument in OPERATOR_ARGUMENTS}
        | {"aclDestroyAclOpExecutor"},
        libraries={name for name in libraries - found if not OF_THE_SYSTEM.match(name)},
    )


def symbols_of(library: Path, kind: str) -> set[str]:
    """Symbols of a library, without versions; ``kind`` is ``--undefined-only`` or ``--defined-only``."""
    lines = (line.split() for line in _run("nm", "-D", kind, str(library)).splitlines())
    return {fields[-1].split("@")[0] for fields in lines if "w" not in fields[:-1]}


def assembler(names: Iterable[str]) -> str:
    """Functions of these names that return 0, or, where they make something by their name, an address."""
    lines = [".text"]
    for name in sorted(names):
        result = "leaq made(%rip), %rax" if name.startswith("aclCreate") else "xorl %eax, %eax"
        lines += [f".globl {name}", f".type {name}, @function", f"{name}:", result, "ret"]
    lines += [".data", ".balign 16", "made: .zero 4096", '.section .note.GNU-stack, "", @progbits']
    return "\n".join(lines) + "\n"


def _needed_by(library: Path) -> set[str]:
    return set(re.findall(r"NEEDED.*\[(.*?)\]", _run("readelf", "-d", str(library))))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
