"""Ranks in processes of their own: they begin with this process' imports, share a store, and all end with it."""

from __future__ import annotations

import ctypes
import os
import pickle
import selectors
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

HOST = "127.0.0.1"
PR_SET_PDEATHSIG = 1


class RankFailedError(RuntimeError):
    """A rank raised an error, or its process ended, or the ranks did not end in time."""


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks find each other: a store of torch.distributed that the process behind them serves.

    Attributes:
        port: Of the store.
        timeout_s: Seconds that a rank waits for others in a collective.
    """

    port: int
    timeout_s: float

    def store(self, prefix: str) -> Any:
        """A rank's access to what begins with a prefix."""
        from torch.distributed import PrefixStore, TCPStore

        timeout = timedelta(seconds=self.timeout_s)
        return PrefixStore(prefix, TCPStore(HOST, self.port, is_master=False, timeout=timeout))


def in_processes(
    num_ranks: int, work: Callable[[int, Rendezvous], Any], *, wait_s: float = 200, timeout_s: float = 600
) -> list[Any]:
    """Let each rank work in a forked process and return what each gave.

    Whatever happens, no process is left behind.

    Args:
        num_ranks: How many.
        work: Called with the rank; its result is pickled.
        wait_s: Seconds that a rank waits for others in a collective.
        timeout_s: Seconds for all of it.

    Raises:
        RankFailedError: A rank failed, or one did not end in time; the others are ended.
    """
    from torch.distributed import TCPStore

    served = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    rendezvous = Rendezvous(served.port, wait_s)
    ranks = {rank: _RankProcess(partial(work, rank, rendezvous)) for rank in range(num_ranks)}
    deadline = time.monotonic() + timeout_s
    try:
        return _results(ranks, deadline)
    except TimeoutError:
        waited_for = ", ".join(str(rank) for rank, process in ranks.items() if not process.has_ended)
        raise RankFailedError(f"after {timeout_s:g} s these ranks have not ended: {waited_for}") from None
    finally:
        for process in ranks.values():
            process.end()


def _results(ranks: dict[int, _RankProcess], deadline: float) -> list[Any]:
    with selectors.DefaultSelector() as selector:
        for rank, process in ranks.items():
            selector.register(process.pipe, selectors.EVENT_READ, rank)
        while selector.get_map():
            events = selector.select(deadline - time.monotonic())
            if not events or time.monotonic() > deadline:
                raise TimeoutError
            for key, _ in events:
                process = ranks[key.data]
                process.read()
                if process.has_ended:
                    selector.unregister(key.fileobj)
                    process.check(f"rank {key.data} of {len(ranks)}")
    return [process.result for process in ranks.values()]


class _RankProcess:
    """One forked process and what it has written to its pipe, which closes when the process ends."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.pipe, writing = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _work_in_child(work, writing, parent)
        os.close(writing)
        self._written = b""
        self._status: int | None = None
        self.has_ended = False
        self.result: Any = None

    def read(self) -> None:
        """Take what there is to read."""
        chunk = os.read(self.pipe, 1 << 16)
        self._written += chunk
        self.has_ended = not chunk

    def check(self, name: str) -> None:
        """Take the result of a process that has ended.

        Raises:
            RankFailedError: There is none.
        """
        self.end()
        if not self._written:
            raise RankFailedError(f"{name} ended without a result, with {_ending(self._status)}")
        error, self.result = pickle.loads(self._written)
        if error is not None:
            raise RankFailedError(f"{name} failed:\n{error}")

    def end(self) -> None:
        """End the process, if it has not, and wait for its end."""
        if self._status is not None:
            return
        if not self.has_ended:
            os.kill(self._pid, signal.SIGKILL)
        _, self._status = os.waitpid(self._pid, 0)
        os.close(self.pipe)


def _ending(status: int | None) -> str:
    code = os.waitstatus_to_exitcode(status or 0)
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _work_in_child(work: Callable[[], Any], pipe: int, parent: int) -> None:
    try:
        end_with_parent(parent)
        try:
            answer = None, work()
        except BaseException:  # noqa: BLE001 - the parent raises it
            answer = traceback.format_exc(), None
        with os.fdopen(pipe, "wb") as writing:
            pickle.dump(answer, writing)
    finally:
        os._exit(0)


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent, of this number, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it was earlier
