"""Runs a command on the stub CANN, which is built first if need be: ``python -m tests.stubcann COMMAND...``.

Without a command, says where the libraries are.
"""

from __future__ import annotations

import os
import sys

from tests.stubcann.build import StubCannError, environment, libraries_folder


def main(command: list[str]) -> None:
    try:
        if not command:
            print(libraries_folder())
            return
        prepared = environment()
    except StubCannError as error:
        sys.exit(str(error))
    os.execvpe(command[0], command, prepared)


if __name__ == "__main__":
    main(sys.argv[1:])
