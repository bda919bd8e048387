"""torch.distributed for simulated ranks: the backend ``hccl``, and a registry of groups for each rank of a process."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d

from npusim.errors import UnmodelledCallError
from npusim.ops.process_group import SimulatedProcessGroup
from npusim.torch_backend.registration import has_platform, platform

HCCL = "hccl"
_DEVICE_TYPES = {"gloo": "cpu", HCCL: "npu"}


class HcclOptions:
    """``ProcessGroupHCCL.Options``.

    Attributes:
        is_high_priority_stream: Accepted as by torch_npu.
        hccl_config: ``hccl_buffer_size`` in megabytes, ``group_name``.
    """

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.hccl_config: dict[str, Any] = {}


def is_hccl_available() -> bool:
    """``torch.distributed.is_hccl_available``, which torch_npu adds."""
    return True


def register_backend() -> None:
    """Make ``hccl`` a backend of torch.distributed, and its process groups a matter of each rank. Once per process."""
    if HCCL.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(HCCL, _create, extended_api=True, devices=["npu"])
    dist.is_hccl_available = is_hccl_available  # type: ignore[attr-defined]  # torch_npu adds it
    _separate_ranks()


def _create(options: Any, hccl_options: HcclOptions | None) -> SimulatedProcessGroup:
    config = hccl_options.hccl_config if hccl_options is not None else {}
    active = platform()
    return SimulatedProcessGroup(
        active.ranks,
        str(options.group_id),
        options.group_rank,
        options.global_ranks_in_group or range(options.group_size),
        device_types=active.ranks.attached.pop(_device_types_slot(), ("npu",)),
        buffer_mb=config.get("hccl_buffer_size"),
        label=config.get("group_name"),
    )


def _device_types_slot() -> tuple[str, int]:
    return "device types of the group in the making", platform().ranks.current


class _RankState:
    """torch.distributed's registry of process groups, for one rank."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.group_count = 0
        self.tags_to_pg: dict[Any, Any] = {}
        self.pg_to_tag: dict[Any, Any] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.comms: list[Any] = []


class _RankRegistries:
    """Stands where torch keeps that registry: in a simulated world each rank has its own, else torch's is used."""

    def __init__(self, original: Any) -> None:
        object.__setattr__(self, "_original", original)

    def _state(self) -> Any:
        if not has_platform():
            return self._original
        ranks = platform().ranks
        return ranks.attached.setdefault(("torch.distributed", ranks.current), _RankState())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._state(), name, value)


def group_of(name: str) -> SimulatedProcessGroup:
    """The calling rank's group of this name.

    Raises:
        UnmodelledCallError: It has none.
    """
    names = distributed_c10d._world.pg_names
    for group, known in names.items():
        if known == name and isinstance(group, SimulatedProcessGroup):
            return group
    raise UnmodelledCallError(f"this rank has no simulated process group {name!r}; there are {sorted(names.values())}")


def _separate_ranks() -> None:
    """Let several ranks of one process each have torch.distributed for themselves.

    The C++ registry of groups by name, which serves functional collectives only, has one entry per name and process, so
    simulated groups stay out of it; functional collectives on device ``npu`` ask :func:`group_of`.
    """
    module: Any = distributed_c10d
    register, unregister = module._register_process_group, module._unregister_process_group
    new_group_helper = module._new_process_group_helper

    def register_process_group(name: str, group: Any) -> None:
        if not isinstance(group, SimulatedProcessGroup):
            register(name, group)

    def unregister_process_group(name: str) -> None:
        if not has_platform():
            unregister(name)

    def new_process_group_helper(
        group_size: int, group_rank: int, global_ranks: list[int], backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Gloo's part of a group is simulated in a world: real gloo would wait for ranks that have no turn."""
        device_types = _simulated_device_types(str(backend)) if has_platform() else None
        if device_types is None:
            return new_group_helper(group_size, group_rank, global_ranks, backend, *args, **kwargs)
        slot = _device_types_slot()
        platform().ranks.attached[slot] = device_types
        group, store = new_group_helper(group_size, group_rank, global_ranks, dist.Backend(HCCL), *args, **kwargs)
        platform().ranks.attached.pop(slot, None)  # a rank outside the group has created nothing
        if group in module._world.pg_map:
            module._world.pg_map[group] = (backend, store)
            module._world.pg_backend_config[group] = str(module.BackendConfig(backend))
        return group, store

    module._register_process_group = register_process_group
    module._unregister_process_group = unregister_process_group
    module._new_process_group_helper = new_process_group_helper
    module._world = _RankRegistries(module._world)


def _simulated_device_types(backend: str) -> tuple[str, ...] | None:
    """Whose tensors a group of a backend like ``cpu:gloo,npu:hccl`` takes; None if it is torch's own to make."""
    names = [part.rpartition(":")[2] for part in backend.split(",")]
    return tuple(_DEVICE_TYPES[name] for name in names) if set(names) <= _DEVICE_TYPES.keys() else None
