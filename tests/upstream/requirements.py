"""Prints what a release of vllm and vllm-ascend asks for in another version than is installed beside it.

python -m tests.upstream.requirements FOLDER   (a folder with both; run by make_environment.sh)

torch and what is built for one version of it stay what they are; so does what only one of the two wants otherwise.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distributions, version

from packaging.requirements import Requirement

KEPT = {"torch", "torch-npu", "torchaudio", "torchvision"}


def unmet(folder: str) -> list[Requirement]:
    """Requirements of the distributions in a folder that the installed packages, where there are any, do not meet."""
    texts = [text for distribution in distributions(path=[folder]) for text in distribution.requires or ()]
    requirements = [Requirement(text) for text in texts]
    return [
        requirement
        for requirement in requirements
        if requirement.name not in KEPT
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
