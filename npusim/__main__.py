"""``python -m npusim``: run commands on simulated devices, replay recordings of real ones, calibrate profiles."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from npusim.device.profile import profile_names
from npusim.errors import NpusimError
from npusim.hook import environment_of_children


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and do what it says; ``run`` replaces this process by the command."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.action(options))
    except NpusimError as error:
        print(f"npusim: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m npusim", description="A simulated Ascend NPU.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a command in which device npu is simulated, also in its child processes")
    run.add_argument("--profile", default="a3-64g", choices=profile_names(), help="kind of device (default: a3-64g)")
    run.add_argument("--num-devices", type=_count, default=1, metavar="N", help="how many there are (default: 1)")
    run.add_argument("--values", choices=("shape", "real"), default="shape", help="what is computed (default: shape)")
    run.add_argument("words", nargs="+", metavar="-- COMMAND", help="the command and its arguments")
    run.set_defaults(action=_run)
    replay = commands.add_parser(
        "replay", help="run recordings (pytest --npusim-record) through the model, and compare"
    )
    replay.add_argument("files", nargs="+", type=Path, metavar="FILE")
    replay.set_defaults(action=_replay)
    calibrate = commands.add_parser("calibrate", help="derive a device profile's calibrated values from recordings")
    calibrate.add_argument("files", nargs="+", type=Path, metavar="FILE")
    calibrate.set_defaults(action=_calibrate)
    doctor = commands.add_parser("doctor", help="show versions, devices, what works here and what is missing")
    doctor.set_defaults(action=_doctor)
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    settings = {"profile": options.profile, "num_devices": options.num_devices, "values": options.values}
    try:
        os.execvpe(options.words[0], options.words, environment_of_children(settings, os.environ))
    except OSError as error:
        print(f"npusim: error: cannot run {options.words[0]}: {error.strerror}", file=sys.stderr)
        return 127


def _replay(options: argparse.Namespace) -> int:
    from npusim.testing.recording import read_recording
    from npusim.testing.replay import replay, report

    num_different = 0
    for path in options.files:
        recording = read_recording(path)
        result = replay(recording)
        num_different += result.difference is not None
        print(report(recording, result), end="\n\n")
    print(f"{len(options.files)} recordings, {num_different} with a difference")
    return 1 if num_different else 0


def _calibrate(options: argparse.Namespace) -> int:
    from npusim.testing.calibrate import calibrate, toml
    from npusim.testing.recording import read_recording

    print(toml(calibrate([read_recording(path) for path in options.files])), end="")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from npusim.doctor import examine

    del options
    findings = list(examine())
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{'!' if finding.is_problem else ' '} {finding.subject:<{width}}  {finding.text}")
    return 1 if any(finding.is_problem for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
