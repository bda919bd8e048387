"""Makes docs/support.md: every vendor name that vllm-ascend's source reads, and whether the doubles model it.

python -m tests.upstream.support_table FOLDER   (the folder that make_environment.sh made)
"""

from __future__ import annotations

import ast
import gzip
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tests.upstream.cases import RELEASES, ROOT

PACKAGES = ("torch_npu", "torch.npu", "torch.ops.npu", "torch.ops.atb", "torch.ops._C_ascend", "acl", "xlite._C")
NAMESPACES = ("npu", "atb", "_C_ascend")
INTRODUCTION = """# Support table

Every name of vendor packages that the source of vllm-ascend {releases} reads, found by going through its syntax trees.
*modelled*: the double does it. *raises*: asking for the name, or calling it, raises `UnmodelledNameError` or
`UnmodelledCallError`; nothing is faked. *tests*: those that name it; for operators the calls recorded on the real
torch_npu that `tests/ops` replays. Made by `python -m tests.upstream.support_table`; do not edit.

{num_modelled} of {num_names} names are modelled. Of the {num_operators} vendor operators whose schemas are known,
{num_kernels} are modelled.
"""


def names_in(folder: Path) -> set[str]:
    """Vendor names in the Python files below a folder."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        if "_cann_ops_custom" not in path.parts:
            names.update(_names_of(ast.parse(path.read_text(encoding="utf-8"))))
    return names


def _names_of(tree: ast.AST) -> Iterator[str]:
    aliases = {"torch_npu": "torch_npu", "torch": "torch", "acl": "acl"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _vendor(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    aliases[alias.asname] = alias.name
                yield from _vendor(alias.name)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            chain = _chain(node)
            if chain and chain[0] in aliases:
                yield from _vendor(".".join((aliases[chain[0]], *chain[1:])))


def _chain(node: ast.expr) -> list[str]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


def _vendor(name: str) -> Iterator[str]:
    if any(name.startswith(f"{package}.") for package in PACKAGES) and name not in ("torch_npu.npu", "torch_npu"):
        name = re.sub(r"^torch_npu\.npu\.", "torch.npu.", re.sub(r"\.(default|out|__\w+__)$", "", name))
        match = re.match(r"(?:torch\.ops\.(?:npu|atb|_C_ascend)|torch_npu(?:\.atb)?)\.(_?npu_\w+)", name)
        if match and not name.startswith("torch.ops._C_ascend"):
            name = f"torch_npu.{match[1]}"  # however it is spelt, and whichever overload
        if name != "torch_npu":
            yield name


def is_modelled(name: str) -> bool:
    """Whether the doubles, in an active world, do what a name stands for."""
    import torch

    operator = re.match(r"(?:torch\.ops\._C_ascend|torch_npu)\.(\w+)$", name)
    if operator and any(has_kernel(f"{namespace}::{operator[1]}") for namespace in NAMESPACES):
        return True
    if name.startswith("torch.ops._C_ascend."):
        return False
    first, _, rest = name.partition(".")
    found: object = torch if first == "torch" else import_module(first)
    path = first
    for part in rest.split("."):
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = import_module(path)
            except ImportError:
                return False
    return not isinstance(found, torch._ops.OpOverloadPacket) and not _only_raises(found)


def has_kernel(operator: str) -> bool:
    """Whether an operator, in any overload, has a kernel on device ``npu``."""
    import torch

    namespace, _, name = operator.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return False
    names = (f"{operator}.{overload}".removesuffix(".default") for overload in packet.overloads())
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(each, "PrivateUse1") for each in names)


def _only_raises(found: object) -> bool:
    function = found.__init__ if inspect.isclass(found) else found
    if not inspect.isfunction(function):
        return False
    body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body  # type: ignore[attr-defined]
    statements = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return len(statements) == 1 and isinstance(statements[0], ast.Raise)


def recorded_calls() -> Counter[str]:
    """How many recorded calls of the real torch_npu there are for each operator, without overloads."""
    calls: Counter[str] = Counter()
    for path in (ROOT / "tests" / "data" / "operators").glob("*.jsonl.gz"):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            calls.update(re.findall(r'"op":"\w+::(\w+)', lines.read()))
    return calls


def tests_of(name: str, texts: dict[str, str], recorded: Counter[str]) -> str:
    """The test files that name it, at most three; or how many recorded calls are replayed."""
    if count := recorded[name.rpartition(".")[2]]:
        return f"{count} recorded calls"
    last = re.escape(name.rpartition(".")[2])
    found = [path for path, text in texts.items() if re.search(rf"(?<!\w){last}(?!\w)", text)]
    return ", ".join(found[:3])


def table(environment: Path) -> str:
    """The page, from the source of both releases."""
    import npusim

    names: set[str] = set()
    for release in RELEASES:
        names |= names_in(environment / release / "vllm_ascend")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    texts = {path.stem: path.read_text(encoding="utf-8") for path in files if path.parent.name != "upstream"}
    with npusim.SimWorld(environment={}):
        from npusim.ops.operator import schemas

        recorded = recorded_calls()
        rows = [(name, is_modelled(name), tests_of(name, texts, recorded)) for name in sorted(names)]
        operators = sorted({name.partition(".")[0] for name in schemas()})
        num_kernels = sum(map(has_kernel, operators))
    head = INTRODUCTION.format(
        releases=" and ".join(RELEASES),
        num_modelled=sum(modelled for _, modelled, _ in rows),
        num_names=len(rows),
        num_operators=len(operators),
        num_kernels=num_kernels,
    )
    lines = [f"| `{name}` | {'modelled' if modelled else 'raises'} | {tests} |" for name, modelled, tests in rows]
    return "\n".join((head, "| name | | tests |", "| --- | --- | --- |", *lines, ""))


if __name__ == "__main__":
    (ROOT / "docs" / "support.md").write_text(table(Path(sys.argv[1])), encoding="utf-8")
