"""``python -m npusim run [--profile NAME] -- COMMAND``: runs a command with simulated devices in place of real ones."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from npusim.device.profile import profile_names
from npusim.hook import environment_of_children


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line; ``run`` replaces this process by the command."""
    parser = argparse.ArgumentParser(prog="python -m npusim", description="A simulated Ascend NPU.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a command in which device npu is simulated, also in its child processes")
    run.add_argument("--profile", default="a3-64g", choices=profile_names(), help="kind of device (default: a3-64g)")
    run.add_argument("--num-devices", type=int, default=1, metavar="N", help="how many there are (default: 1)")
    run.add_argument("--values", choices=("shape", "real"), default="shape", help="what is computed (default: shape)")
    run.add_argument("words", nargs="+", metavar="-- COMMAND", help="the command and its arguments")
    options = parser.parse_args(arguments)
    settings = {"profile": options.profile, "num_devices": options.num_devices, "values": options.values}
    try:
        os.execvpe(options.words[0], options.words, environment_of_children(settings, os.environ))
    except OSError as error:
        print(f"npusim: error: cannot run {options.words[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
