"""Prints what a release of vllm and vllm-ascend asks for in another version than is there for it, one a line.

python -m tests.upstream.requirements FOLDER   (a folder with both; run by make_environment.sh until nothing is left)

torch and what is built for one version of it stay what they are.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distributions, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

KEPT = {"torch", "torch-npu", "torchaudio", "torchvision"}


def unmet(folder: str) -> list[Requirement]:
    """Requirements of a folder's distributions that packages there, or else in this environment, do not meet.

    Packages that are nowhere do not count, nor do those in the folder: they are what another requirement asked for.
    """
    there = list(distributions(path=[folder]))
    settled = {canonicalize_name(distribution.name) for distribution in there} | KEPT
    requirements = [Requirement(text) for distribution in there for text in distribution.requires or ()]
    return [
        requirement
        for requirement in requirements
        if canonicalize_name(requirement.name) not in settled
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and (installed := installed_version(requirement.name)) is not None
        and not requirement.specifier.contains(installed, prereleases=True)
    ]


def installed_version(name: str) -> str | None:
    """Of a package in this environment, if it is there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    print("\n".join(f"{requirement.name}{requirement.specifier}" for requirement in unmet(sys.argv[1])))
