"""A simulated world: devices, clock, ledgers, event log, and what one process sees of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar

from npusim.device.card import Card
from npusim.device.clock import Clock, HostClock
from npusim.device.cost import BARE_LOOP, HostCosts
from npusim.device.event_log import EventLog
from npusim.device.profile import DeviceProfile, load_profile
from npusim.errors import UnmodelledCallError, WorldError
from npusim.hccl.communicator import DEFAULT_BUFFER_MB, DEFAULT_EXEC_TIMEOUT_S, Communicator, HcclSettings
from npusim.hccl.rank_process import RankProcess, Store
from npusim.hccl.ranks import LoneRank, Ranks
from npusim.installation import install, uninstall
from npusim.memory.config import AllocatorConfig
from npusim.memory.uncached import caching_is_off
from npusim.memory.versions import VERSIONS as TORCH_NPU_VERSIONS
from npusim.torch_backend.runtime import DeviceRuntime
from npusim.torch_backend.sleep_mode import SleepModeMemory
from npusim.torch_backend.storage import StorageTable
from npusim.torch_backend.values import RealValues, ShapeValues, Told, Values
from npusim.xlite.versions import VERSIONS as XLITE_VERSIONS

T = TypeVar("T")
TRUE_LIKE = frozenset({"1", "true", "yes", "on"})


class SimWorld:
    """Everything simulated, in one object; used as a context, it is what device ``npu`` means inside.

    Args:
        profile: Kind of device: a profile's name, or one that was loaded.
        num_devices: How many there are.
        seed: Seed of the devices' default generators.
        environment: Variables that vendor software reads (``HCCL_BUFFSIZE``, ``PYTORCH_NPU_ALLOC_CONF``, ...). Default:
            this process' own environment at this moment.
        values: ``shape``: numbers exist only where they follow from host data, so that a model's size costs nothing.
            ``real``: everything is computed; for tiny models.
        told_values: In a world of shapes, asked for the numbers of a device tensor that is read though nobody computed
            them, e.g. sampled tokens: a :class:`npusim.told.ToldTokens`, or something of your own that speaks like
            it.
        torch_npu_version: Release whose allocator is imitated: ``2.13`` or ``2.10``.
        xlite_version: Release of xlite that is imitated.
        total_bytes: Memory of each device instead of the profile's; one number for all, or one per device (None: the
            profile's).
        free_bytes: Free at the start on each device; likewise.
        other_processes: Bytes held by other processes, by name; the same on every device, or one mapping per device.
        keep_events: Keep the event log's events, not only their hash.
        host_costs: What launching work costs the host.
        lone_rank: Only this rank runs, on the device of its number; in collectives the others do as it does. Default:
            all ranks run, by :meth:`run_ranks`.
        store: With ``lone_rank``: the other ranks are processes of their own, each with a world like this one, that
            share this store of ``torch.distributed``; collectives exchange values.

    Raises:
        ProfileError: The profile is unknown or broken.
        WorldError: Sizes or settings contradict each other.
    """

    def __init__(
        self,
        profile: str | DeviceProfile = "a3-64g",
        *,
        num_devices: int = 1,
        seed: int = 0,
        environment: Mapping[str, str] | None = None,
        values: Literal["shape", "real"] = "shape",
        told_values: Told | None = None,
        torch_npu_version: str = "2.13",
        xlite_version: str = "0.1.0rc11",
        total_bytes: int | Sequence[int | None] | None = None,
        free_bytes: int | Sequence[int | None] | None = None,
        other_processes: Mapping[str, int] | Sequence[Mapping[str, int]] = (),
        keep_events: bool = False,
        host_costs: HostCosts = BARE_LOOP,
        lone_rank: int | None = None,
        store: Store | None = None,
    ) -> None:
        _check_choice("values", values, ("shape", "real"))
        _check_choice("torch_npu_version", torch_npu_version, tuple(TORCH_NPU_VERSIONS))
        _check_choice("xlite_version", xlite_version, tuple(XLITE_VERSIONS))
        _check_type("profile", profile, (str, DeviceProfile), "a profile or its name")
        _check_whole("num_devices", num_devices, at_least=1)
        _check_whole("seed", seed)
        if lone_rank is not None:
            _check_whole("lone_rank", lone_rank)
        _check_type("host_costs", host_costs, HostCosts, "npusim.device.cost.HostCosts")
        if environment is not None:
            _check_environment(environment)
        self.profile = load_profile(profile) if isinstance(profile, str) else profile
        self.environment = dict(os.environ if environment is None else environment)
        self.xlite_version = xlite_version
        self.event_log = EventLog(keep=keep_events)
        self.clock = Clock()
        self.ranks = _ranks(lone_rank, store, self.clock)
        self.storages = StorageTable()
        self.values: Values = (
            RealValues(self.storages) if values == "real" else ShapeValues(self.storages, told=told_values)
        )
        totals = _per_device("total_bytes", total_bytes, num_devices)
        frees = _per_device("free_bytes", free_bytes, num_devices)
        others = _per_device("other_processes", other_processes or {}, num_devices)
        _check_memory(totals, frees, others)
        self.cards = [
            Card(
                index,
                self.profile,
                self.clock,
                self.event_log,
                total_bytes=totals[index],
                free_bytes=frees[index],
                other_processes=dict(others[index]),
                host_costs=host_costs,
            )
            for index in range(num_devices)
        ]
        self.sleep_mode = SleepModeMemory(self.cards, self.storages)
        settings = AllocatorConfig.from_environment(self.environment)
        task_queue_level = _task_queue_level(self.environment)
        hccl = _hccl_settings(self.environment)
        self.runtimes = [
            DeviceRuntime(
                card,
                settings,
                torch_npu_version=torch_npu_version,
                task_queue_level=task_queue_level,
                seed=seed,
                hccl=hccl,
                caches_tensors=not caching_is_off(self.environment.get("PYTORCH_NO_NPU_MEMORY_CACHING", "")),
            )
            for card in self.cards
        ]
        self._devices_of_ranks: dict[int, int] = {}

    def current_device(self) -> int:
        """Index of the calling rank's current device; 0 until it chose another."""
        return self._devices_of_ranks.get(self.ranks.current, 0)

    def set_device(self, index: int) -> None:
        """Make a device the calling rank's current one; it stays so in later calls of :meth:`run_ranks`.

        Raises:
            WorldError: There is no such device.
        """
        if not 0 <= index < len(self.cards):
            raise WorldError(f"device npu:{index} does not exist; this world has {len(self.cards)} device(s)")
        self._devices_of_ranks[self.ranks.current] = index

    def run_ranks(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run one function per rank, all in this process, and return their results.

        The order is always the same: a rank runs until it waits in a collective, then the next one does. In virtual
        time they begin no earlier than the caller is, and the caller goes on when the last one is done.
        """
        self.clock.start_together(len(functions))
        results = self.ranks.run(functions)
        self.clock.end_together(len(functions))
        return results

    def host_clock(self, rank: int | None = None) -> HostClock:
        """Virtual time as a rank's host sees it, in seconds; by default whichever rank asks."""
        return HostClock(self.clock if rank is None else self.clock.of(rank))

    def hccl_communicator(self, name: str) -> Communicator:
        """The communicator of this name on the calling rank's device.

        Raises:
            UnmodelledCallError: No group of that name was opened.
        """
        communicators = self.runtimes[self.current_device()].communicators
        if name not in communicators:
            raise UnmodelledCallError(f"no HCCL communicator is called {name!r}; there are {sorted(communicators)}")
        return communicators[name]

    def __enter__(self) -> Self:
        install(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        uninstall(self)


def _check_choice(name: str, choice: str, choices: Sequence[str]) -> None:
    if choice not in choices:
        raise WorldError(f"{name} must be one of {', '.join(choices)}, got {choice!r}")


def _check_type(name: str, value: object, wanted: type | tuple[type, ...], shown: str) -> None:
    if not isinstance(value, wanted):
        raise WorldError(f"{name} must be {shown}, got {value!r}")


def _check_whole(name: str, number: object, at_least: int = 0) -> None:
    if type(number) is not int or number < at_least:
        raise WorldError(f"{name} must be a whole number of at least {at_least}, got {number!r}")


def _check_environment(environment: object) -> None:
    _check_type("environment", environment, Mapping, "variables by name")
    assert isinstance(environment, Mapping)
    for name, value in environment.items():
        _check_type(f"the variable {name!r}", value, str, "a text")


def _check_memory(totals: Sequence[object], frees: Sequence[object], others: Sequence[object]) -> None:
    for name, sizes in (("total_bytes", totals), ("free_bytes", frees)):
        for size in sizes:
            if size is not None:
                _check_whole(name, size)
    for processes in others:
        _check_type("other_processes", processes, Mapping, "bytes by name")
        assert isinstance(processes, Mapping)
        for name, size in processes.items():
            _check_whole(f"other_processes[{name!r}]", size)


def _ranks(lone_rank: int | None, store: Store | None, clock: Clock) -> Ranks:
    if lone_rank is None:
        if store is not None:
            raise WorldError("a store needs lone_rank: which of its ranks this process is")
        return Ranks(clock)
    return LoneRank(lone_rank, clock) if store is None else RankProcess(lone_rank, store, clock)


def _per_device(name: str, setting: T | Sequence[T], num_devices: int) -> Sequence[T]:
    if not isinstance(setting, (list, tuple)):
        return [setting] * num_devices  # type: ignore[list-item]
    if len(setting) != num_devices:
        raise WorldError(
            f"{name} has {len(setting)} entries for {num_devices} devices; give one for all or one per device"
        )
    return setting


def _task_queue_level(environment: Mapping[str, str]) -> int:
    level = environment.get("TASK_QUEUE_ENABLE", "1")
    if level not in ("0", "1", "2"):
        raise WorldError(f"TASK_QUEUE_ENABLE should be 0, 1 or 2, got {level!r}")
    return 0 if environment.get("ASCEND_LAUNCH_BLOCKING") == "1" else int(level)


def _hccl_settings(environment: Mapping[str, str]) -> HcclSettings:
    text = environment.get("HCCL_BUFFSIZE", str(DEFAULT_BUFFER_MB))
    if not text.isdecimal() or int(text) < 1:
        raise WorldError(f"HCCL_BUFFSIZE must be an integer of at least 1 (megabytes), got {text!r}")
    timeout = environment.get("HCCL_EXEC_TIMEOUT", str(DEFAULT_EXEC_TIMEOUT_S))
    if not timeout.isdecimal():
        raise WorldError(f"HCCL_EXEC_TIMEOUT must be a whole number of seconds, 0 for no limit, got {timeout!r}")
    deterministic = environment.get("HCCL_DETERMINISTIC", "").lower() in TRUE_LIKE
    uses_aiv = environment.get("HCCL_OP_EXPANSION_MODE") == "AIV" and not deterministic
    return HcclSettings(int(text), uses_aiv, int(timeout))
