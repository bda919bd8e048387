"""Imports go one way between the rooms of npusim, and nothing that a simulation computes depends on chance or time."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "device": {"errors"},
    "memory": {"errors", "device"},
    "hccl": {"errors", "device", "memory"},
    "torch_backend": {"errors", "device", "memory", "hccl"},
    "ops": {"errors", "device", "memory", "hccl", "torch_backend"},
    "xlite": {"errors", "device", "memory", "hccl", "torch_backend", "ops"},
    "vendor": {
        "device",
        "errors",
        "hccl",
        "hook",
        "installation",
        "memory",
        "ops",
        "torch_backend",
        "world",
        "xlite",
    },
    "report": {"device", "errors", "memory"},
    "testing": {"device", "errors", "hccl", "hook", "installation", "memory", "torch_backend", "world"},
}
"""Rooms of npusim, and what each may import besides itself."""
ROOTS = {path.stem for path in (ROOT / "npusim").glob("*.py")} - BELOW.keys()
"""Modules beside the rooms: they put the rooms together, or npusim is entered by them."""
PACKAGES: dict[str, set[str]] = {
    "errors": set(),
    "device": {"numpy", "simpy"},
    "memory": {"sortedcontainers"},
    "hccl": set(),
    "torch_backend": {"torch"},
    "ops": {"numpy", "torch"},
    "xlite": {"numpy", "torch"},
    "vendor": {"acl", "numpy", "torch", "torch_npu", "triton", "xlite"},
    "report": {"matplotlib"},
    "testing": {"_pytest", "pluggy", "pydantic", "pytest", "torch", "torch_npu"},
}
"""Packages of others that a room may import."""
CHANCE_AND_TIME = {"datetime", "random", "secrets", "time", "uuid"}
WALL_CLOCK = "xlite_runner/serving/clock.py"
"""The only module that may ask for real time: what it gives is for cards; a composition root chooses it."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of names and attributes; the attributes' part where they are of something else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a module imports anywhere."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "npusim":
                yield from ((node.lineno, f"npusim.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "npusim").parts[0].removesuffix(".py")


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_rooms_are_known():
    rooms = {room_of(path) for path in sources("npusim")}
    assert rooms - ROOTS == BELOW.keys() == PACKAGES.keys(), "a new room needs its place in BELOW and PACKAGES"


def test_imports_between_rooms_go_one_way():
    wrong = []
    for path in sources("npusim"):
        room = room_of(path)
        for line, name in imports(path):
            if name.startswith("npusim.") and room not in ROOTS:
                other = name.split(".")[1]
                if other != room and other not in BELOW[room]:
                    wrong.append(f"{place(path, line)}: {room} imports {name}")
    assert wrong == []


def test_rooms_use_only_their_packages():
    wrong = []
    for path in sources("npusim"):
        room = room_of(path)
        for line, name in imports(path):
            package = name.split(".")[0]
            if package == "npusim" or package in sys.stdlib_module_names or room in ROOTS:
                continue
            if package not in PACKAGES[room]:
                wrong.append(f"{place(path, line)}: {room} imports {package}")
    assert wrong == []


def test_the_runner_does_not_know_the_simulation():
    roots = {"cli.py", "simulation.py"}
    wrong = [
        f"{place(path, line)}: {name}"
        for path in sources("xlite_runner")
        for line, name in imports(path)
        if name.split(".")[0] == "npusim" and path.name not in roots
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["npusim", "xlite_runner"])
def test_neither_chance_nor_time_decides_anything(package):
    wrong = []
    for path in sources(package):
        banned = CHANCE_AND_TIME - {"time"} if path == ROOT / WALL_CLOCK else CHANCE_AND_TIME
        wrong += [f"{place(path, line)}: {name}" for line, name in imports(path) if name in banned]
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and dotted(node).startswith(("np.random.rand", "os.urandom")):
                wrong.append(f"{place(path, node.lineno)}: {dotted(node)}")
            if isinstance(node, ast.Call):
                name = dotted(node.func)
                if name == "id" or (name == "np.random.default_rng" and not node.args):
                    wrong.append(f"{place(path, node.lineno)}: {name}()")
    assert wrong == []


def test_only_the_roots_read_the_environment():
    wrong = [
        f"{place(path, node.lineno)}: {dotted(node)}"
        for path in sources("npusim")
        if room_of(path) not in ROOTS
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "os.getenv")
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["npusim", "xlite_runner"])
def test_every_public_module_says_what_it_is(package):
    silent = [str(path.relative_to(ROOT)) for path in sources(package) if not ast.get_docstring(tree(path))]
    assert silent == []


def test_packages_are_imported_quickly_and_without_torch():
    program = """
import sys, time
begin = time.process_time()  # whatever else the machine does meanwhile
import npusim, xlite_runner
print(time.process_time() - begin, "torch" in sys.modules)
"""
    seconds = []
    for _ in range(3):  # the first time, files may not be in the cache
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        took, has_torch = done.stdout.split()
        assert has_torch == "False"
        seconds.append(float(took))
        if seconds[-1] < 0.2:
            return
    assert min(seconds) < 0.2
