"""Figures of a benchmark by the definitions and under the names of ``vllm bench serve`` (vLLM 0.23.0)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, field_validator

Floats = npt.NDArray[np.float64]

_Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Goodput(BaseModel):
    """Limits in ms that a good request meets; None is no limit."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    ttft: _Milliseconds | None = None
    tpot: _Milliseconds | None = None
    e2el: _Milliseconds | None = None


class BenchOptions(BaseModel):
    """The table ``[bench]`` of a scenario: what is reported.

    Attributes:
        goodput: With a limit, ``request_goodput`` counts the requests that meet all of them.
        metric_percentiles: Percentiles of each latency.
        save_detailed: Report every request's figures, too.
        survives_errors: An error of the engine ends the requests that it has, not the benchmark.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    goodput: Goodput = Goodput()
    metric_percentiles: tuple[Annotated[float, Field(ge=0, le=100)], ...] = (99.0,)
    save_detailed: bool = False
    survives_errors: bool = False

    @field_validator("metric_percentiles", mode="before")
    @classmethod
    def _list_as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What became of one request, as its sender saw it. Times are seconds on the benchmark's clock.

    Attributes:
        start_time: When it was sent.
        prompt_len: Tokens of the prompt.
        output_len: Tokens that came back.
        chunk_times: When something came back; one chunk is all new tokens of one step.
        end_time: When it ended; None while it runs.
        error: Why it failed; None if it did not.
        num_preemptions: How often its blocks were taken away.
    """

    req_id: str
    start_time: float
    prompt_len: int
    output_len: int = 0
    chunk_times: array[float] = field(default_factory=lambda: array("d"))
    end_time: float | None = None
    error: str | None = None
    num_preemptions: int = 0

    @property
    def is_completed(self) -> bool:
        """Whether it ended with a result."""
        return self.end_time is not None and self.error is None

    @property
    def ttft(self) -> float:
        """Seconds until the first chunk."""
        return self.chunk_times[0] - self.start_time

    @property
    def latency(self) -> float:
        """Seconds until the last chunk."""
        return self.chunk_times[-1] - self.start_time

    @property
    def tpot(self) -> float:
        """Mean seconds of a token after the first; 0 without any."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def itls(self) -> Floats:
        """Seconds between chunks."""
        return np.diff(np.frombuffer(self.chunk_times, dtype=np.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Distribution of one latency in ms."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, seconds: Floats, percentiles: Sequence[float]) -> Latency:
        """The distribution of values in seconds; zeros if there are none, as vLLM."""
        values = (seconds if len(seconds) else np.zeros(1)) * 1e3
        return cls(
            mean=float(np.mean(values)),
            median=float(np.median(values)),
            std=float(np.std(values)),
            percentiles=tuple((p, float(np.percentile(values, p))) for p in percentiles),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodeStats:
    """Draft tokens of a benchmark; names are vLLM's.

    Attributes:
        num_drafts: Verifications of draft tokens.
        per_position_acceptance_rates: Part of the verifications in which the draft token at each position was accepted.
    """

    num_drafts: int
    draft_tokens: int
    accepted_tokens: int
    per_position_acceptance_rates: tuple[float, ...]

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens in percent."""
        return 100 * self.accepted_tokens / self.draft_tokens

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a verification, its own included."""
        return 1 + self.accepted_tokens / self.num_drafts

    def to_dict(self) -> dict[str, Any]:
        """The keys of vLLM's JSON."""
        return {
            "spec_decode_acceptance_rate": self.acceptance_rate,
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted_tokens,
            "spec_decode_per_position_acceptance_rates": list(self.per_position_acceptance_rates),
        }


@dataclass(frozen=True, kw_only=True)
class BenchmarkMetrics:
    """Figures over all requests; names are vLLM's.

    Attributes:
        duration: Seconds from the first request until all have ended.
        request_goodput: Requests per second that meet all limits; None without limits.
        max_output_tokens_per_s: Most chunks of completed requests in one of the seconds since the first was sent.
        max_concurrent_requests: Most completed requests under way in one such second.
        latencies: By ``ttft``, ``tpot``, ``itl``, ``e2el``.
    """

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    latencies: Mapping[str, Latency]

    def to_dict(self) -> dict[str, Any]:
        """The keys of vLLM's JSON, with values rounded to nothing."""
        flat = {key: value for key, value in vars(self).items() if key != "latencies"}
        for name, latency in self.latencies.items():
            flat[f"mean_{name}_ms"] = latency.mean
            flat[f"median_{name}_ms"] = latency.median
            flat[f"std_{name}_ms"] = latency.std
            flat |= {f"p{p:g}_{name}_ms": value for p, value in latency.percentiles}
        return flat


def calculate_metrics(
    records: Sequence[RequestRecord], duration: float, goodput: Goodput, percentiles: Sequence[float]
) -> BenchmarkMetrics:
    """Figures over all requests that have ended.

    Args:
        records: All requests.
        duration: Seconds of the whole benchmark; with 0, rates are 0.
        goodput: Limits of good requests.
        percentiles: Which ones of each latency.
    """
    completed = [record for record in records if record.is_completed]
    total_input = sum(record.prompt_len for record in completed)
    total_output = sum(record.output_len for record in completed)
    seconds = {
        "ttft": np.array([record.ttft for record in completed]),
        "tpot": np.array([record.tpot for record in completed if record.output_len > 1]),
        "itl": np.concatenate([record.itls for record in completed]) if completed else np.zeros(0),
        "e2el": np.array([record.latency for record in completed]),
    }
    per_second = 1 / duration if duration else 0.0
    has_limits = goodput != Goodput()
    max_tokens, max_concurrent = _maxima(completed)
    return BenchmarkMetrics(
        duration=duration,
        completed=len(completed),
        failed=len(records) - len(completed),
        total_input_tokens=total_input,
        total_output_tokens=total_output,
        request_throughput=len(completed) * per_second,
        request_goodput=sum(_is_good(record, goodput) for record in completed) * per_second if has_limits else None,
        output_throughput=total_output * per_second,
        total_token_throughput=(total_input + total_output) * per_second,
        max_output_tokens_per_s=max_tokens,
        max_concurrent_requests=max_concurrent,
        latencies={name: Latency.of(values, percentiles) for name, values in seconds.items()},
    )


def _is_good(record: RequestRecord, goodput: Goodput) -> bool:
    pairs = ((record.ttft, goodput.ttft), (record.tpot, goodput.tpot), (record.latency, goodput.e2el))
    return all(limit is None or seconds <= limit / 1e3 for seconds, limit in pairs)


def _maxima(completed: Sequence[RequestRecord]) -> tuple[float, int]:
    """Most chunks, and most requests under way, in any second since the first request was sent."""
    if not completed:
        return 0.0, 0
    origin = min(record.start_time for record in completed)
    num_seconds = math.ceil(max(record.chunk_times[-1] for record in completed) - origin) + 1
    chunks = np.zeros(num_seconds, dtype=np.int64)
    changes = np.zeros(num_seconds + 1, dtype=np.int64)
    for record in completed:
        seconds = (np.frombuffer(record.chunk_times, dtype=np.float64) - origin).astype(np.int64)
        chunks += np.bincount(seconds, minlength=num_seconds)
        changes[int(record.start_time - origin)] += 1
        changes[seconds[-1] + 1] -= 1
    return float(chunks.max()), int(np.cumsum(changes).max())
