"""Requests that wait for their blocks, in the order of the scheduling policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from sortedcontainers import SortedKeyList

from xlite_runner.config import SchedulingPolicy
from xlite_runner.serving.core.request import Request


class RequestQueue(Protocol):
    """What the scheduler needs of either queue; every operation takes constant or logarithmic time."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be served."""
        ...

    def add(self, request: Request) -> None:
        """Queue a new request."""
        ...

    def add_preempted(self, request: Request) -> None:
        """Queue a request that ran before."""
        ...

    def peek(self) -> Request:
        """The next request, left in the queue."""
        ...

    def pop(self) -> Request:
        """The next request, taken out."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out of the middle."""
        ...


class FCFSRequestQueue:
    """First come, first served; a preempted request goes to the front."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:  # noqa: D102 - RequestQueue says it
        self._requests[request.request_id] = request

    def add_preempted(self, request: Request) -> None:  # noqa: D102
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:  # noqa: D102
        return next(iter(self._requests.values()))

    def pop(self) -> Request:  # noqa: D102
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:  # noqa: D102
        del self._requests[request.request_id]


class PriorityRequestQueue:
    """By priority, arrival and name, preempted or not."""

    def __init__(self) -> None:
        self._requests = SortedKeyList(key=lambda request: (request.priority, request.arrival_time, request.request_id))

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:  # noqa: D102 - RequestQueue says it
        self._requests.add(request)

    def add_preempted(self, request: Request) -> None:  # noqa: D102
        self._requests.add(request)

    def peek(self) -> Request:  # noqa: D102
        request: Request = self._requests[0]
        return request

    def pop(self) -> Request:  # noqa: D102
        request: Request = self._requests.pop(0)
        return request

    def remove(self, request: Request) -> None:  # noqa: D102
        self._requests.remove(request)


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty queue of a policy."""
    return PriorityRequestQueue() if policy is SchedulingPolicy.PRIORITY else FCFSRequestQueue()
