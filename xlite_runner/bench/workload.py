"""The workload of a benchmark: the table ``[workload]`` of a scenario, and the requests it stands for.

Names and defaults are those of ``vllm bench serve`` (vLLM 0.23.0) where it has them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_serializer,
    model_validator,
)

from xlite_runner.bench.arrivals import RampUpStrategy, arrival_times, ramp_up_times
from xlite_runner.bench.traces import (
    MAX_SECONDS,
    MAX_TOKENS,
    READERS,
    SampleRequest,
    Segment,
    TimedTraceLabels,
    read_timed_trace,
)
from xlite_runner.errors import WorkloadError
from xlite_runner.serving.sampling_params import SamplingParams

DatasetName = Literal["random", "sharegpt", "custom", "azure", "burstgpt", "mooncake", "timed_trace"]

DEFAULT_NUM_PROMPTS = 1000
MAX_NUM_PROMPTS = 10_000_000
"""More would not fit into the memory of an ordinary host."""

_NumTokens = Annotated[int, Field(gt=0, le=MAX_TOKENS)]
_PREFIX, _RANDOM = 2, 3


def _sampling_over_defaults(value: object) -> object:
    """What is not said of the sampling: greedy, and EOS does not end a request, since its tokens mean nothing."""
    if not isinstance(value, dict):
        return value
    given = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
    return {"temperature": 0.0, "ignore_eos": True, **given}


class Workload(BaseModel):
    """Which requests come, and when. Lengths are in tokens, rates in requests per second.

    Attributes:
        dataset_name: ``random``, or the format of the file in ``dataset_path``.
        num_prompts: Requests to serve; None: 1000 random ones, or all of the file.
        seed: Of the random lengths, tokens and arrivals; independent of the engine's.
        request_rate: None: at the times that the file says, or else all at once; infinity: all at once.
        burstiness: Shape of the gamma distribution of the gaps between requests; 1 is a Poisson process.
        max_concurrency: Most requests that are sent and not finished; the others wait with the sender.
        ramp_up_strategy: How the rate goes from ``ramp_up_start_rps`` to ``ramp_up_end_rps``; instead of a rate.
        random_range_ratio: Random lengths are drawn between (1 - ratio) and (1 + ratio) times the length.
        random_prefix_len: Tokens before the random prompt that all requests share.
        draft_acceptance_rate: With speculation, the probability that a draft token is right.
        sampling: Every request's; ``max_tokens`` is replaced by the length to generate.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    dataset_name: DatasetName = "random"
    dataset_path: Path | None = None
    num_prompts: Annotated[int, Field(gt=0, le=MAX_NUM_PROMPTS)] | None = None
    seed: NonNegativeInt = 0
    request_rate: Annotated[float, Field(gt=0)] | None = None
    burstiness: Annotated[float, Field(gt=0)] = 1.0
    max_concurrency: PositiveInt | None = None
    ramp_up_strategy: RampUpStrategy | None = None
    ramp_up_start_rps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    ramp_up_end_rps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    random_input_len: _NumTokens = 1024
    random_output_len: _NumTokens = 128
    random_range_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    random_prefix_len: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    timed_trace_chunk_hash_size: PositiveInt = 16
    timed_trace_sec_multiplier: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    timed_trace_label_timestamp: str = "timestamp"
    timed_trace_label_input_length: str = "input_length"
    timed_trace_label_output_length: str = "output_length"
    timed_trace_label_hash_ids: str = "hash_ids"
    draft_acceptance_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    sampling: Annotated[SamplingParams, BeforeValidator(_sampling_over_defaults)] = SamplingParams(
        temperature=0.0, ignore_eos=True
    )

    @field_serializer("request_rate", "burstiness")
    def _infinity_as_text(self, value: float | None) -> float | str | None:
        return "inf" if value == math.inf else value  # JSON has no infinity

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if math.isnan(self.request_rate or 0) or math.isnan(self.burstiness):
            raise ValueError("request_rate and burstiness: allowed are numbers above 0, and inf")
        if self.dataset_name == "random" and self.dataset_path is not None:
            raise ValueError(f'dataset_path = "{self.dataset_path}": allowed with another dataset_name than "random"')
        if self.dataset_name != "random" and self.dataset_path is None:
            raise ValueError(f'missing key "dataset_path": dataset_name = "{self.dataset_name}" is read from a file')
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if ends != (None, None):
                raise ValueError("ramp_up_start_rps and ramp_up_end_rps: allowed with ramp_up_strategy")
        elif None in ends or self.request_rate is not None:
            raise ValueError(
                f'ramp_up_strategy = "{self.ramp_up_strategy}": needs ramp_up_start_rps and ramp_up_end_rps, '
                "and no request_rate"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """One request, and when it comes.

    Attributes:
        arrival_time: Seconds after the start.
        seed: Of its tokens, with the keys of its stretches.
    """

    req_id: str
    arrival_time: float
    sample: SampleRequest
    sampling_params: SamplingParams
    seed: int

    def prompt_token_ids(self, vocab_size: int) -> Sequence[int]:
        """The prompt, made only now: thousands of long prompts at once would fill the memory of the host."""
        tokens = array("i")
        for segment in self.sample.prompt:
            generator = np.random.default_rng((self.seed, *segment.key))
            tokens.frombytes(generator.integers(0, vocab_size, segment.num_tokens, dtype=np.int32).tobytes())
        return tokens


def build_requests(workload: Workload) -> list[TimedRequest]:
    """The requests of a workload in the order in which they come; the same for the same workload.

    Raises:
        WorkloadError: The file cannot be read, or a line of it is wrong; or there is no request in it, or one comes
            only after decades.
    """
    samples = list(islice(_samples(workload), workload.num_prompts))
    if not samples:
        raise WorkloadError(f"{workload.dataset_path}: has no request that can be served")
    times = _times(workload, samples)
    if not all(0 <= time <= MAX_SECONDS for time in times):
        raise WorkloadError(
            f"with request_rate = {workload.request_rate} and burstiness = {workload.burstiness} the last request "
            f"comes after {times[-1]:g} s: allowed are times from 0 to {MAX_SECONDS:g} s"
        )
    requests = [
        TimedRequest(
            req_id=str(index),
            arrival_time=time,
            sample=sample,
            sampling_params=_sampling(workload, sample),
            seed=workload.seed,
        )
        for index, (sample, time) in enumerate(zip(samples, times, strict=True))
    ]
    return sorted(requests, key=lambda request: request.arrival_time)


def _samples(workload: Workload) -> Iterator[SampleRequest]:
    if workload.dataset_path is None:
        return _random_samples(workload)
    if workload.dataset_name == "timed_trace":
        return read_timed_trace(workload.dataset_path, _labels(workload))
    return READERS[workload.dataset_name](workload.dataset_path)


def _random_samples(workload: Workload) -> Iterator[SampleRequest]:
    generator = np.random.default_rng(workload.seed)
    num_prompts = workload.num_prompts or DEFAULT_NUM_PROMPTS
    ratio = workload.random_range_ratio

    def lengths(middle: int) -> list[int]:
        low, high = math.floor(middle * (1 - ratio)), math.ceil(middle * (1 + ratio))
        drawn: list[int] = generator.integers(max(low, 1), high + 1, num_prompts).tolist()
        return drawn

    input_lens, output_lens = lengths(workload.random_input_len), lengths(workload.random_output_len)
    prefix = Segment(key=(_PREFIX,), num_tokens=workload.random_prefix_len)
    for index, (input_len, output_len) in enumerate(zip(input_lens, output_lens, strict=True)):
        own = Segment(key=(_RANDOM, index), num_tokens=input_len)
        yield SampleRequest(prompt=(prefix, own) if prefix.num_tokens else (own,), expected_output_len=output_len)


def _times(workload: Workload, samples: Sequence[SampleRequest]) -> list[float]:
    count, burstiness, seed = len(samples), workload.burstiness, workload.seed
    start_rps, end_rps = workload.ramp_up_start_rps, workload.ramp_up_end_rps
    if workload.ramp_up_strategy is not None and start_rps is not None and end_rps is not None:
        return ramp_up_times(count, workload.ramp_up_strategy, start_rps, end_rps, burstiness, seed)
    if workload.request_rate is None:
        return [sample.timestamp or 0.0 for sample in samples]
    return arrival_times(count, workload.request_rate, burstiness, seed)


def _sampling(workload: Workload, sample: SampleRequest) -> SamplingParams:
    max_tokens = sample.expected_output_len
    min_tokens = min(workload.sampling.min_tokens, max_tokens)
    return workload.sampling.model_copy(update={"max_tokens": max_tokens, "min_tokens": min_tokens})


def _labels(workload: Workload) -> TimedTraceLabels:
    prefix = "timed_trace_"
    values: dict[str, Any] = {
        name.removeprefix(prefix).removeprefix("label_"): getattr(workload, name)
        for name in Workload.model_fields
        if name.startswith(prefix)
    }
    return TimedTraceLabels(**values)
