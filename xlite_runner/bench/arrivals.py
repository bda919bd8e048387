"""When requests come: the arrival process of ``vllm bench serve``, drawn from a seed."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

RampUpStrategy = Literal["linear", "exponential"]


def arrival_times(num_requests: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request comes, without ramp-up.

    Gaps follow a gamma distribution: burstiness 1 is a Poisson process, less is more bursty, infinity is one request
    every 1 / rate. As in vLLM the times are then stretched so that the last request comes at ``num_requests / rate``.

    Args:
        num_requests: How many, at least 1.
        request_rate: Requests per second; infinity: all come at once.
        burstiness: Shape of the distribution.
        seed: Of the draw.
    """
    if math.isinf(request_rate):
        return [0.0] * num_requests
    times = np.cumsum(_gaps(np.full(num_requests, request_rate), burstiness, seed))
    with np.errstate(divide="ignore", invalid="ignore"):  # gaps too small for numbers give times that are none
        stretched: list[float] = (times * (num_requests / request_rate / times[-1])).tolist()
    return stretched


def ramp_up_times(
    num_requests: int, strategy: RampUpStrategy, start_rps: float, end_rps: float, burstiness: float, seed: int
) -> list[float]:
    """The same with a rate that goes from ``start_rps`` to ``end_rps`` over the requests; nothing is stretched."""
    progress = np.arange(num_requests) / max(num_requests - 1, 1)
    if strategy == "linear":
        rates = start_rps + (end_rps - start_rps) * progress
    else:
        rates = start_rps * (end_rps / start_rps) ** progress
    times: list[float] = np.cumsum(_gaps(rates, burstiness, seed)).tolist()
    return times


def _gaps(rates: npt.NDArray[np.float64], burstiness: float, seed: int) -> npt.NDArray[np.float64]:
    if math.isinf(burstiness):
        return 1 / rates
    return np.random.default_rng(seed).gamma(burstiness, 1 / (rates * burstiness))
