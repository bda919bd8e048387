"""Recordings: written by a session, replayed through the model, calibrated on."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path

import pytest

import npusim
from npusim.__main__ import main
from npusim.device.profile import load_profile
from npusim.errors import RecordingError
from npusim.testing.calibrate import calibrate
from npusim.testing.recording import Event, Phase, Recording, read_recording
from npusim.testing.replay import replay, report

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
PROGRAM = """
import gc
import pytest, torch

MIB = 1 << 20

def block(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device="npu")

def test_blocks(npu_memory):
    blocks = [block(size) for size in (1, 513, 700 << 10, 3 * MIB, 9 * MIB, 15 * MIB)]
    npu_memory.phase("blocks")
    del blocks[1::2]
    blocks += [block(size) for size in (2 * MIB, 100, 14 * MIB)]
    del blocks
    npu_memory.phase("deleted")
    torch.npu.empty_cache()
    kept = block(5 * MIB)

def test_streams(npu_device):
    side = torch.npu.Stream()
    x = block(4 * MIB)
    with torch.npu.stream(side):
        y = block(4 * MIB)
    x.record_stream(side)
    del x, y
    torch.npu.synchronize()
    z = block(4 * MIB)

def test_out_of_memory(npu_memory):
    free_bytes = npu_memory.free_bytes
    kept = block(free_bytes // 2)
    cached = block(free_bytes // 4)
    del cached
    kept_too = block(free_bytes // 3)
    with pytest.raises(torch.OutOfMemoryError):
        block(free_bytes // 2)
    del kept, kept_too

def test_pool(npu_device):
    pool = torch.npu.MemPool()
    with torch.npu.use_mem_pool(pool):
        x = block(3 * MIB)
        y = block(100)
    z = block(3 * MIB)
    del x, y, pool

def test_switches_the_record(npu_device):
    torch.npu.memory._record_memory_history(enabled=None)
    block(100)
"""
EXPANDABLE = """
import pytest, torch

MIB = 1 << 20

@pytest.mark.npu_settings(environment={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"})
def test_expandable(npu_device):
    blocks = [torch.empty(size * MIB, dtype=torch.uint8, device="npu") for size in (30, 50, 3, 1, 70)]
    del blocks[1:3]
    torch.npu.empty_cache()
    blocks.append(torch.empty(90 * MIB, dtype=torch.uint8, device="npu"))
    del blocks
    torch.npu.empty_cache()
    again = torch.empty(90 * MIB, dtype=torch.uint8, device="npu")
"""


def files(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("*.json.gz"))]


def test_record_and_replay(run, pytester, capsys):
    result = run(PROGRAM, "--npusim-record=out")
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(
        [
            "recorded 4 in out",
            "not recorded: *::test_switches_the_record: the test switched the allocator's record or its statistics",
        ]
    )
    recordings = files(pytester.path / "out")
    assert len(recordings) == 4
    capsys.readouterr()
    assert main(["replay", *recordings]) == 0
    shown = capsys.readouterr().out
    assert "4 recordings, 0 with a difference" in shown
    assert [line.split()[0] for line in shown.split("\n\n")[0].splitlines()[2:]] == [
        "start", "set", "blocks", "deleted", "end", "No"
    ]  # fmt: skip


def test_a_test_in_another_working_directory(run, pytester):
    result = run(
        "def test_moves(npu_device, monkeypatch, tmp_path): monkeypatch.chdir(tmp_path)", "--npusim-record=out"
    )
    result.assert_outcomes(passed=1)
    assert len(files(pytester.path / "out")) == 1


def test_a_folder_that_vanishes(run):
    """The test's own outcome stands, and the terminal says what is missing."""
    result = run(
        """
        from pathlib import Path

        def test_removes(npu_device, request):
            Path("out").rmdir()
            Path("out").touch()
        """,
        "--npusim-record=out",
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["not recorded: *::test_removes: cannot write to *out: *"])


@pytest.mark.sim_only("a card's settings come from the environment of the process")
def test_expandable_segments(run, pytester):
    run(EXPANDABLE, "--npusim-record=out").assert_outcomes(passed=1)
    (file,) = files(pytester.path / "out")
    recording = read_recording(Path(file))
    assert recording.environment == {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    assert "segment_unmap" in {event.action for event in recording.events}
    assert replay(recording).difference is None


CALIBRATION = (ROOT / "examples" / "ci" / "test_calibration.py").read_text(encoding="utf-8")


def test_what_is_recorded_replays_and_calibrates(run, pytester, capsys):
    run(CALIBRATION, "--npusim-record=out").assert_outcomes(passed=1)
    (file,) = files(pytester.path / "out")
    capsys.readouterr()
    assert main(["replay", file]) == 0
    assert re.search(r"^No difference in \d+ events and 7 phases\.$", capsys.readouterr().out, re.MULTILINE)
    assert main(["calibrate", file]) == 0
    shown = capsys.readouterr().out
    outside = {phase.name: phase.outside_bytes for phase in read_recording(Path(file)).phases}
    for key, num_bytes in (
        ("total_bytes", read_recording(Path(file)).phases[0].total_bytes),
        ("context_bytes", outside["start"]),
        ("operator_library_bytes", outside["first operator"] - outside["opened"]),
        ("acl_graph_bytes", outside["graph captured"] - outside["second tensor"]),
    ):
        assert f'[{key}]\nvalue = {num_bytes}\ngrade = "calibrated"\nsource = "1 recording(s) on ' in shown


@pytest.mark.sim_only("a card has no profile to compare with")
def test_a_profile_comes_out_of_a_recording_again(run, pytester, capsys):
    run(CALIBRATION, "--npusim-record=out", "--npusim-profile=a2-64g").assert_outcomes(passed=1)
    recordings = files(pytester.path / "out")
    capsys.readouterr()
    assert main(["calibrate", *recordings, *recordings]) == 0
    shown = capsys.readouterr().out
    profile = load_profile("a2-64g")
    for key in ("total_bytes", "context_bytes", "operator_library_bytes", "acl_graph_bytes"):
        assert (
            f'[{key}]\nvalue = {getattr(profile, key).value}\ngrade = "calibrated"\nsource = "2 recording(s) on '
            in shown
        )
    assert "# residuals: 0, 0" in shown
    assert f"on {profile.soc_name.value} with torch 2.13" in shown


GIB = 1 << 30
RECORDING = Recording(
    test="test_x.py::test_x",
    device="Ascend910B3",
    device_index=0,
    versions={"npusim": "0.1.0", "torch": "2.13.0", "torch_npu": "2.13.0", "cann": "8.5.0"},
    environment={"HCCL_BUFFSIZE": "128"},
    phases=(
        Phase("start", 0, free_bytes=60 * GIB, total_bytes=61 * GIB, allocated_bytes=0, reserved_bytes=0),
        Phase("end", 5, 60 * GIB - 20 * MIB, 61 * GIB, 3 * MIB + 512, 20 * MIB),
    ),
    events=(
        Event("segment_alloc", 0xA000_0000, 20 * MIB, 0),
        Event("alloc", 0xA000_0000, 4 * MIB, 0),
        Event("alloc", 0xA040_0200, 3 * MIB, 0),
        Event("free_requested", 0xA000_0000, 4 * MIB, 0),
        Event("free_completed", 0xA000_0000, 4 * MIB, 0),
    ),
)


WRITTEN = RECORDING.content()


def changed(number: int, **fields: object) -> Recording:
    events = list(RECORDING.events)
    events[number] = replace(events[number], **fields)
    return replace(RECORDING, events=tuple(events))


@pytest.mark.parametrize(
    ("recording", "position", "recorded", "modelled"),
    [
        (changed(0, size=10 * MIB), 0, "segment_alloc of 10485760 bytes", "segment_alloc of 20971520 bytes"),
        (changed(2, address=0xA040_0400), 2, "at 0xa0400400 on stream 0", "at 0x120000400200 on stream 0"),
        (
            replace(RECORDING, phases=(RECORDING.phases[0], replace(RECORDING.phases[1], allocated_bytes=3 * MIB))),
            5,
            "3145728 bytes allocated, 20971520 reserved",
            "3146240 bytes allocated, 20971520 reserved",
        ),
        (replace(RECORDING, events=RECORDING.events[1:]), 0, "alloc of 4194304", "segment_alloc of 20971520"),
        (
            replace(RECORDING, events=(*RECORDING.events[:1], *RECORDING.events)),
            1,
            "segment_alloc of 20971520",
            "alloc of",
        ),
    ],
    ids=["size", "address", "figures", "missing", "twice"],
)
def test_first_difference(recording, position, recorded, modelled):
    difference = replay(recording).difference
    assert difference is not None
    assert difference.position == position
    assert recorded in difference.recorded
    assert modelled in difference.modelled


def test_report_of_a_difference():
    recording = changed(2, address=0xA040_0400)
    lines = report(recording, replay(recording)).splitlines()
    assert lines[0] == "test_x.py::test_x on Ascend910B3, torch_npu 2.13.0"
    assert lines[2].split() == ["start", "0", str(60 * GIB), str(GIB), "0", "0", "same"]
    assert lines[3:] == [
        "First difference at event 2 of 5, after 'start':",
        "  before    segment_alloc of 20971520 bytes at 0xa0000000 on stream 0",
        "  before    alloc of 4194304 bytes at 0xa0000000 on stream 0",
        "  recorded  alloc of 3145728 bytes at 0xa0400400 on stream 0",
        "  model     alloc of 3145728 bytes at 0x120000400200 on stream 0",
    ]


def test_files(tmp_path):
    path = tmp_path / "folder" / "x.json.gz"
    RECORDING.write(path)
    assert read_recording(path) == RECORDING
    before = path.read_bytes()
    RECORDING.write(path)
    assert path.read_bytes() == before
    with pytest.raises(RecordingError, match=r"y\.json\.gz cannot be read: No such file"):
        read_recording(tmp_path / "y.json.gz")


DAMAGED = "is no recording, or a damaged one: "
NEWER = f"is a recording in format 'npusim-recording-2'; npusim {npusim.__version__} reads 'npusim-recording-1'."


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        pytest.param(b"text", "cannot be read: Not a gzipped file", id="text"),
        pytest.param(packed(b"[]"), DAMAGED + "TypeError", id="list"),
        pytest.param(packed(b"{}"), DAMAGED + "KeyError('format')", id="no format"),
        pytest.param(packed(b'{"format": "npusim-recording-2"}'), NEWER, id="newer"),
        pytest.param(packed(b'{"format": "npusim-recording-1"}'), DAMAGED + "test: Field required", id="no fields"),
        pytest.param(packed(WRITTEN.replace(b"0,", b"-1,")), DAMAGED, id="negative"),
        pytest.param(packed(WRITTEN.replace(b'"cann"', b'"can"')), DAMAGED + "ValueError('no version", id="no version"),
        pytest.param(
            packed(WRITTEN.replace(b'events": 5', b'events": 6')), DAMAGED + "ValueError('phases", id="phases"
        ),
        pytest.param(packed(WRITTEN.replace(b",4194304", b',"4 MiB"')), DAMAGED + "events.1.size", id="event"),
        pytest.param(packed(WRITTEN.replace(b"20971520", b'"x"')), DAMAGED + "phases.1.reserved_bytes", id="phase"),
        pytest.param(packed(WRITTEN[:-5]), DAMAGED + "JSONDecodeError", id="half a line"),
        pytest.param(packed(WRITTEN)[:-20], DAMAGED + "EOFError", id="half a file"),
        pytest.param(packed(WRITTEN)[:40] + bytes(40) + packed(WRITTEN)[80:], DAMAGED, id="hole"),
    ],
)
def test_files_that_are_no_recordings(content, complaint, tmp_path, capsys):
    path = tmp_path / "x.json.gz"
    path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    assert f"npusim: error: {path} {complaint}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recording", "complaint"),
    [
        (replace(RECORDING, versions=RECORDING.versions | {"torch_npu": "2.1.0"}), "torch_npu 2.1 is not modelled"),
        (replace(RECORDING, phases=()), "the recording of test_x.py::test_x has no phases"),
        (
            replace(RECORDING, environment={"PYTORCH_NPU_ALLOC_CONF": "banana:1"}),
            "test_x.py::test_x: its allocator settings are refused: Unrecognized key 'banana'",
        ),
        (replace(RECORDING, events=RECORDING.events[3:]), "a block at 0xa0000000 is freed, but was not allocated"),
    ],
)
def test_recordings_that_cannot_be_replayed(recording, complaint):
    with pytest.raises(RecordingError, match=complaint):
        replay(recording)


def test_calibration_takes_the_median_and_shows_residuals():
    steps = ("first communicator", "further communicator")

    def recording(*growth_bytes: int) -> Recording:
        free_bytes, phases = 60 * GIB, list(RECORDING.phases[:1])
        for name, num_bytes in zip(steps, growth_bytes, strict=True):
            free_bytes -= num_bytes
            phases.append(Phase(name, 0, free_bytes, 61 * GIB, 0, 0))
        return replace(RECORDING, phases=tuple(phases), events=())

    buffers = 257 * MIB  # two of HCCL_BUFFSIZE and the window
    values = {
        entry.key: (entry.value, entry.residuals)
        for entry in calibrate([recording(buffers + 90, buffers + 70), recording(buffers + 96, buffers + 71)] * 2)
    }
    assert values == {
        "total_bytes": (61 * GIB, (0, 0, 0, 0)),
        "context_bytes": (GIB, (0, 0, 0, 0)),
        "hccl_runtime_bytes": (93, (-3, 3, -3, 3)),
        "communicator_control_bytes": (70, (0, 1, 0, 1)),
    }


def test_calibration_on_one_device_only():
    with pytest.raises(RecordingError, match=r"recordings of different devices or versions: Ascend910B3 .*Ascend910B4"):
        calibrate([RECORDING, replace(RECORDING, device="Ascend910B4")])


def test_command_line_errors(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "npusim: error: " in capsys.readouterr().err
