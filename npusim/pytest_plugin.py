"""npusim's pytest plugin: the same tests on the simulated device and on an Ascend card.

``docs/testing.md`` has the options, fixtures and markers. Loading this module imports neither torch nor anything else
that takes time; the simulated device enters a process when it was chosen for the session, or when a test asks for it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from npusim.errors import NpusimError
from npusim.testing import marks
from npusim.testing.capabilities import Hooks, capabilities, own_capabilities
from npusim.testing.choice import DEVICES, Choice, prepare, prepare_early, prepare_folder, read_choice, use_doubles
from npusim.testing.summary import Summary

if TYPE_CHECKING:
    import torch

    from npusim.testing.faults import NpuFaults
    from npusim.testing.memory import NpuMemory
    from npusim.testing.recorder import Recorder
    from npusim.testing.watch import Watch
    from npusim.world import SimWorld

_CHOICE = pytest.StashKey[Choice]()
_RECORDINGS = pytest.StashKey[Path | None]()
_MARKER_ERROR = pytest.StashKey[str]()
_WATCH = pytest.StashKey["Watch"]()


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the hooks that npusim calls."""
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, each of which may stand in the configuration file too."""
    group = parser.getgroup("npusim", "simulated Ascend NPU")
    group.addoption(
        "--npusim-device",
        choices=DEVICES,
        dest="npusim_device",  # said, since npusim.device_option shares it
        help="sim: the simulated device; npu: real torch_npu on an Ascend card (default: sim, when a test asks for it)",
    )
    group.addoption("--npusim-profile", metavar="NAME", help="kind of simulated device (default: a3-64g)")
    group.addoption(
        "--npusim-seed", metavar="N", help="seed of simulated devices and of torch in their tests (default: 0)"
    )
    group.addoption(
        "--npusim-replay",
        metavar="TOKEN",
        help="PROFILE:SEED:DIGEST of a failure report: do the same again, and fail if the event log is another",
    )
    group.addoption(
        "--npusim-record",
        metavar="DIR",
        help="write what the device did in each test to DIR, for python -m npusim replay and calibrate",
    )
    for name in ("npusim_device", "npusim_profile", "npusim_seed"):
        parser.addini(name, f"as --{name.replace('_', '-')}", default="")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Let a conftest.py that imports torch_npu find the double, if device sim was chosen."""
    prepare_early(read_choice(early_config, early_config.known_args_namespace))


def pytest_configure(config: pytest.Config) -> None:
    """Make the chosen device usable, or stop."""
    for line in marks.MARKERS:
        config.addinivalue_line("markers", line)
    choice = read_choice(config, config.option)
    config.stash[_CHOICE] = choice
    prepare(choice)
    config.stash[_RECORDINGS] = _prepare_recordings(config)
    config.pluginmanager.register(Summary(choice.device), "npusim_summary")


def _prepare_recordings(config: pytest.Config) -> Path | None:
    name: str | None = config.option.npusim_record
    if name is None:
        return None
    if not name:
        raise pytest.UsageError("--npusim-record needs the name of a folder, got ''")
    folder = config.invocation_params.dir / name  # absolute, for tests that change the working directory
    prepare_folder(folder)
    return folder


def pytest_report_header(config: pytest.Config) -> str:
    """Device, profile, seed and versions."""
    return config.stash[_CHOICE].header()


@pytest.hookimpl(trylast=True)
def pytest_npusim_capabilities(config: pytest.Config) -> Mapping[str, str | None]:
    """What the two devices can do."""
    return own_capabilities(config.stash[_CHOICE].device)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what the device under test cannot run, each with its reason."""
    choice, known = config.stash[_CHOICE], capabilities(config)
    for item in items:
        try:
            reason = marks.skip_reason(item, choice, known)
            marks.check(item, choice)
        except NpusimError as error:
            item.stash[_MARKER_ERROR] = str(error)
            continue
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
            item.user_properties.append(("npusim_skipped", reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test whose markers are wrong; a usage error would not get through to the user from a worker process."""
    if _MARKER_ERROR in item.stash:
        pytest.fail(item.stash[_MARKER_ERROR], pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note what a test did on the device, and fail it for what it promised and did not keep to."""
    watch = item.stash.get(_WATCH, None)
    if watch is None:
        return (yield)
    watch.before_call()
    try:
        result = yield
    finally:
        item.user_properties.extend(watch.properties())
        if watch.recorder is not None:
            item.user_properties.append(_write_recording(item, watch.recorder))
    complaints = list(watch.complaints(item.config.rootpath))
    if complaints:
        pytest.fail("\n\n".join(complaints), pytrace=False)
    return result


def _write_recording(item: pytest.Item, recorder: Recorder) -> tuple[str, str]:
    folder = item.config.stash[_RECORDINGS]
    assert folder is not None
    reason = recorder.write(folder, item.nodeid)
    return ("npusim_not_recorded", reason) if reason else ("npusim_recorded", item.config.option.npusim_record)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say in a failure report how to do the same again."""
    report = yield
    watch = item.stash.get(_WATCH, None)
    if watch is not None and report.when == "call" and report.failed:
        hint = watch.replay_hint(item.nodeid)
        if hint:
            report.sections.append(("npusim replay", hint))
    return report


@pytest.fixture(autouse=True)
def _npusim_memory_markers(request: pytest.FixtureRequest) -> None:
    """Tests with a memory marker have their memory watched, also if they do not use the fixture."""
    if any(map(request.node.get_closest_marker, marks.MEMORY_MARKERS)):
        request.getfixturevalue("npu_memory")


@pytest.fixture
def npu_world(request: pytest.FixtureRequest) -> Iterator[SimWorld | None]:
    """The device under test is usable inside the test: a fresh simulated world, or the card.

    On the simulated device it is the :class:`npusim.SimWorld`, made as the markers ``npu_settings``, ``npu_profile``
    and ``seed`` say, and without environment variables but those of ``npu_settings(environment=...)``. On a card it is
    None.
    """
    choice: Choice = request.config.stash[_CHOICE]
    settings = marks.world_settings(request.node, choice)
    if choice.device == "npu":
        _skip_on_another_card(settings, marks.profile_of(request.node))
        _take_over_the_card()
        yield from _watched(request, choice, None, settings["seed"])
        return
    with _make_world(settings) as world:
        yield from _watched(request, choice, world, settings["seed"])


def _make_world(settings: Mapping[str, Any]) -> SimWorld:
    problem = use_doubles()
    if problem:
        pytest.fail(problem, pytrace=False)
    from npusim.world import SimWorld

    known = inspect.signature(SimWorld).parameters
    strangers = ", ".join(sorted(settings.keys() - known))
    if strangers:
        pytest.fail(f"npu_settings: not an argument of npusim.SimWorld: {strangers}", pytrace=False)
    try:
        return SimWorld(**settings)
    except (NpusimError, ValueError) as error:  # the vendor's complaints about environment variables are bare ones
        message = f"npu_world cannot be made as the markers say: {error}"
    pytest.fail(message, pytrace=False)


def _watched(
    request: pytest.FixtureRequest, choice: Choice, world: SimWorld | None, seed: int
) -> Iterator[SimWorld | None]:
    import torch

    from npusim.testing import memory
    from npusim.testing.recorder import Recorder
    from npusim.testing.watch import Watch

    watch = request.node.stash[_WATCH] = Watch(choice, world)
    if request.config.stash[_RECORDINGS] is not None:
        environment = os.environ if world is None else world.environment
        watch.recorder = Recorder(memory.begin(), world, environment)
    host_state = torch.get_rng_state()
    torch.manual_seed(seed)
    yield world
    torch.set_rng_state(host_state)


def _take_over_the_card() -> None:
    """Whatever earlier tests of this process left: garbage, a full cache, another current device and stream."""
    from torch_npu import npu

    from npusim.testing import memory

    npu.set_device(0)
    npu.set_stream(npu.default_stream(0))
    memory.settle()


def _skip_on_another_card(settings: Mapping[str, Any], profile: str | None) -> None:
    import torch_npu

    from npusim.device.profile import load_profile

    wanted, found = settings.get("num_devices", 1), torch_npu.npu.device_count()
    if wanted > found:
        pytest.skip(f"needs {wanted} devices, there are {found}")
    if profile is not None:
        soc_name, own_name = load_profile(profile).soc_name.value, torch_npu.npu.get_device_name(0)
        if soc_name != own_name:
            pytest.skip(f"npu_profile {profile}: needs a {soc_name}, this is a {own_name}")


@pytest.fixture
def npu_device(npu_world: object) -> torch.device:
    """The device under test, as torch names it."""
    del npu_world
    import torch

    return torch.device("npu", 0)


@pytest.fixture
def npu_memory(request: pytest.FixtureRequest, npu_world: SimWorld | None) -> Iterator[NpuMemory]:
    """Memory of the test: ``npu_memory.peak_allocated_bytes`` and others, the vendor's own figures on either device."""
    del npu_world
    from npusim.testing.memory import begin, end

    watch: Watch = request.node.stash[_WATCH]
    watch.memory = begin() if watch.recorder is None else watch.recorder.memory
    watch.limit = marks.memory_limit(request.node)
    watch.leaks_nothing = request.node.get_closest_marker("npu_leaks_nothing") is not None
    yield watch.memory
    end()


@pytest.fixture
def npu_faults(request: pytest.FixtureRequest, npu_world: SimWorld | None) -> NpuFaults:
    """What goes wrong on the simulated devices; a test that uses it is skipped on a card."""
    lack = capabilities(request.config)["faults"]
    if lack is not None or npu_world is None:
        pytest.skip(f"needs faults: {lack}")
    from npusim.testing.faults import NpuFaults

    return NpuFaults(npu_world)
