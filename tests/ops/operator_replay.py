"""Replays recorded operator calls of the real torch_npu on a simulated device and says what differs."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch

import npusim
from npusim.errors import UncomputedValueError, UnmodelledCallError
from npusim.torch_backend.registration import platform
from npusim.torch_backend.storage import StorageTable, contiguous_stride

DATA = Path(__file__).parents[1] / "data" / "operators"
LEDGER = DATA / "ledger.json"
Record = dict[str, Any]
PLAIN_FORMATS = (0, 2, 30)
BLOCKED_FORMATS = (29, 50, 51)
OTHER_FORMATS = (1, 3, 4, 27, 32, 33)
FOLLOWS_VALUES = ("aten::repeat_interleave.Tensor", "aten::repeat_interleave.self_Tensor")
READS_VALUES = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::bincount",
        "aten::copy_",
        "aten::equal",
        "aten::item",
        "aten::one_hot",
        "aten::repeat_interleave.Tensor",
        "aten::repeat_interleave.self_Tensor",
        "aten::to.device",
        "npu::npu_grouped_matmul",
        "npu::npu_grouped_matmul.List",
    }
)
"""Operators whose results depend on numbers; the recorder's memory held zeros."""


def families() -> list[str]:
    return sorted(path.name.removesuffix(".jsonl.gz") for path in DATA.glob("*.jsonl.gz"))


_LACKING = ("Failed to find function", "GetOpApiFuncAddr failed")


@cache
def load(family: str) -> tuple[Record, tuple[Record, ...]]:
    """Header and records of a family, variants included."""
    with gzip.open(DATA / f"{family}.jsonl.gz", "rt", encoding="utf-8") as file:
        header, *records = (json.loads(line) for line in file)
    return header, tuple(records)


def records(family: str, variant: str | None = None) -> Iterator[Record]:
    """The records of the main run, or of a variant where it differs (merged with the main run's)."""
    _, all_records = load(family)
    main = {record["n"]: record for record in all_records if "variant" not in record}
    if variant is None:
        yield from main.values()
        return
    for record in all_records:
        if record.get("variant") == variant:
            merged = {**main[record["n"]], **record}
            for key in ("out", "error"):
                if record.get(key, "") is None:
                    del merged[key]
            yield merged


def is_call(record: Record) -> bool:
    """Whether the record is of an operator; others are of Python functions of torch_npu."""
    return not record["op"].startswith("py::")


class Kind(StrEnum):
    """Why a record is not matched. The ledger has one list for each."""

    NO_KERNEL = "the operator is not modelled: the double raises"
    FORM = "this form of its arguments, or its type, is not modelled: the double raises"
    VALUES = "the result's size depends on numbers, which the recording does not hold"
    RECORDER = "the recorder's stand-in for CANN lacks what the call needs"
    STRICTER = "the double refuses what the operator library refuses, too; the recorder's stand-in for it did not look"
    OTHER_TEXT = "both refuse, in other words"
    NOT_REFUSED = "torch_npu refuses arguments that nobody passes; the double does not look"
    FORMATS = "blocked memory formats through an operator that is not a cast or a product"
    ALLOCATIONS = "other memory for an odd form of the arguments: more dimensions, other types"
    RESULT = (
        "another type or stride of the result for an odd form of the arguments, or another value of unknown numbers"
    )


class _Recorder:
    """Notes what the caching allocator is asked for."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._sizes: dict[int, int] = {}
        self.events: list[list[Any]] = []
        malloc, free = allocator.malloc, allocator.free

        def recording_malloc(num_bytes: int, stream: int) -> int:
            address: int = malloc(num_bytes, stream)
            if num_bytes:
                self._sizes[address] = num_bytes
                self.events.append(["a", num_bytes])
            return address

        def recording_free(address: int) -> None:
            if address in self._sizes:
                self.events.append(["f", self._sizes.pop(address)])
            free(address)

        allocator.malloc, allocator.free = recording_malloc, recording_free


class Replayer:
    """One simulated device to replay on; use it inside its world.

    Args:
        profile: The device.
    """

    def __init__(self, profile: str = "a2-64g") -> None:
        self.world = npusim.SimWorld(profile, environment={"TASK_QUEUE_ENABLE": "0"})
        self._runtime = self.world.runtimes[0]
        self._allocator = self._runtime.allocator
        self._recorder = _Recorder(self._allocator)
        self._stand_in_for_other_ranks()

    def unmatched(self, record: Record) -> tuple[Kind | None, str]:
        """Why the simulated device does otherwise than the record says, None if it does not; and in detail."""
        if "died" in record or any(text in record.get("error", "") for text in _LACKING):
            return Kind.RECORDER, ""
        try:
            found = self.differences(record)
        except UncomputedValueError:
            return Kind.VALUES, ""
        except UnmodelledCallError as refused:
            is_missing = str(refused).startswith("operator ") or str(refused) == record["op"]
            return (Kind.NO_KERNEL if is_missing else Kind.FORM), str(refused)
        detail = "; ".join(found)
        if not found:
            return None, ""
        if found == ["not refused"]:
            return Kind.NOT_REFUSED, f"{detail}: {record['error']}"
        if detail.startswith("refused with"):
            return Kind.OTHER_TEXT, f"{detail}, recorded {record['error']}"
        if detail.startswith("refused: "):
            return (Kind.VALUES if record["op"] in FOLLOWS_VALUES else Kind.STRICTER), detail
        if any(_has_format(record.get(key), BLOCKED_FORMATS) for key in ("args", "kw", "out")):
            return Kind.FORMATS, detail
        return (Kind.ALLOCATIONS if "allocations" in detail else Kind.RESULT), detail

    def differences(self, record: Record) -> list[str]:
        """What the simulated device did otherwise than the record says; empty if nothing.

        Raises:
            UnmodelledCallError: The double refuses the call as not modelled.
        """
        allocator, recorder = self._allocator, self._recorder
        if not record.get("allow_internal_format", True):
            raise UnmodelledCallError("internal formats switched off")
        if any(_has_format(record.get(key), OTHER_FORMATS) for key in ("args", "kw", "out")):
            raise UnmodelledCallError("memory formats other than plain ones and FRACTAL_NZ")
        allocator.empty_cache()
        args = self._made(record["args"], record["op"])
        kwargs = {name: self._made(value, record["op"]) for name, value in record["kw"].items()}
        inputs = dict(_tensors(args, "")) | {
            path: t for name, value in kwargs.items() for path, t in _tensors(value, name)
        }
        allocator.empty_cache()
        allocator.reset_peak_memory_stats()
        recorder.events = []
        before = allocator.memory_allocated
        error = result = None
        try:
            result = resolve(record["op"], args, kwargs)(*args, **kwargs)
        except (UnmodelledCallError, UncomputedValueError):
            raise
        except Exception as refused:  # noqa: BLE001 - compared with the recorded refusal
            refused.__traceback__ = None
            error = f"{type(refused).__name__}: {refused}".split(" This could be because the operator ")[0]
        if "error" in record:
            if error is None:
                return ["not refused"]
            return [] if error == record["error"] else [f"refused with {error!r}"]
        if error is not None:
            return [f"refused: {error}"]
        found = []
        events = [event for event in record["events"] if event[0] in "af"]
        if recorder.events != events:
            found.append(f"allocations {recorder.events}, recorded {events}")
        allocated = [before, allocator.max_memory_allocated, allocator.memory_allocated]
        if "variant" not in record and allocated != record["mem"]["allocated"][:3]:
            found.append(f"allocated {allocated}, recorded {record['mem']['allocated'][:3]}")
        found += _result_differences(result, record["out"], inputs, "")
        return found

    def _stand_in_for_other_ranks(self) -> None:
        """As the recorder's HCCL did: operators that communicate find a communicator, and nobody waits."""
        communicator = self._runtime.hccl.communicator("stub", 1)
        for rank in range(2):
            self._runtime.communicators[f"stub_comm_{rank}"] = communicator
        self.world.ranks.meet = lambda *args, **kwargs: None  # type: ignore[method-assign]

    def _made(self, value: Any, operator: str) -> Any:
        if isinstance(value, dict):
            if "t" in value:
                return self._tensor(value, operator)
            if "repeat" in value:
                return [value["repeat"][0]] * value["repeat"][1]
            first, last, step = value["range"]
            return list(range(first, last + (1 if step > 0 else -1), step))
        if isinstance(value, list):
            return [self._made(item, operator) for item in value]
        if isinstance(value, str):
            return _scalar(value)
        return value

    def _tensor(self, recorded: Record, operator: str) -> torch.Tensor:
        size = tuple(recorded["t"])
        dtype = getattr(torch, recorded["d"])
        stride = tuple(recorded.get("s") or contiguous_stride(size))
        offset = recorded.get("o", 0)
        if recorded.get("dev", "npu") == "cpu":
            host = torch.empty(recorded["b"] // dtype.itemsize, dtype=dtype)
            return torch.as_strided(host, size, stride, offset)
        storages: StorageTable = self.world.storages
        in_order = None
        if recorded.get("f", 2) not in PLAIN_FORMATS:  # cast from one in order, which leaves its mark on the allocator
            in_order = storages.allocate(self._runtime, math.prod(size) * dtype.itemsize)
        storage = storages.allocate(self._runtime, recorded["b"])
        if in_order is not None:
            storages.of_storage(storage).npu_format = recorded["f"]
        tensor = storages.tensor(storage, dtype, size, stride, offset)
        return tensor.zero_() if operator in READS_VALUES else tensor


def resolve(operator: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The callable that the recorder called."""
    namespace, _, name = operator.partition("::")
    name, _, overload = name.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        return getattr(packet, overload or "default")
    except AttributeError:
        raise UnmodelledCallError(operator) from None


def _scalar(text: str) -> Any:
    if text.startswith("torch.") and text.removeprefix("torch.").replace("_", "").isalnum():
        return getattr(torch, text.removeprefix("torch."))
    if text in ("inf", "-inf", "nan"):
        return float(text)
    device = re.fullmatch(r"device\(type='(\w+)'(?:, index=(\d+))?\)", text)
    return torch.device(device[1], int(device[2] or 0)) if device else text


def _has_format(value: Any, formats: tuple[int, ...]) -> bool:
    if isinstance(value, dict):
        return value.get("f") in formats or any(_has_format(item, formats) for item in value.values())
    return isinstance(value, list) and any(_has_format(item, formats) for item in value)


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}.{index}" if path else str(index))


def _result_differences(result: Any, recorded: Any, inputs: dict[str, torch.Tensor], path: str) -> list[str]:
    if isinstance(recorded, list) and isinstance(result, (list, tuple)):
        if len(result) != len(recorded):
            return [f"{len(result)} results, recorded {len(recorded)}"]
        return [
            difference
            for index, (one, expected) in enumerate(zip(result, recorded, strict=True))
            for difference in _result_differences(one, expected, inputs, f"{path}.{index}" if path else str(index))
        ]
    if not (isinstance(recorded, dict) and "t" in recorded):
        return (
            []
            if isinstance(recorded, (dict, str, float)) or result == recorded
            else [f"{path}: {result!r} for {recorded!r}"]
        )
    if not isinstance(result, torch.Tensor):
        return [f"{path}: {result!r} instead of a tensor"]
    size = tuple(recorded["t"])
    expected = {
        "shape": size,
        "dtype": recorded["d"],
        "stride": tuple(recorded.get("s") or contiguous_stride(size)),
        "offset": recorded.get("o", 0),
        "storage bytes": recorded["b"],
        "device": recorded.get("dev", "npu"),
        "alias": recorded.get("alias"),
        "format": recorded["f"] if recorded.get("f", 2) not in PLAIN_FORMATS else 2,
    }
    storage = result.untyped_storage()
    alias = None
    if recorded["b"]:
        alias = next((p for p, t in inputs.items() if t.untyped_storage()._cdata == storage._cdata), None)
    found = {
        "shape": tuple(result.shape),
        "dtype": str(result.dtype).removeprefix("torch."),
        "stride": result.stride(),
        "offset": result.storage_offset(),
        "storage bytes": storage.nbytes(),
        "device": result.device.type,
        "alias": alias,
        "format": platform().storages.of(result).npu_format if result.device.type == "npu" else 2,
    }
    return [f"{path} {key} {found[key]}, recorded {expected[key]}" for key in expected if found[key] != expected[key]]
