"""Serves a workload as ``vllm bench serve`` would send it, on whatever clock the engine runs.

One loop is sender and engine at once: requests are handed over when they have come, a step runs, its tokens go back at
the time at which it ends. The way between sender and engine takes no time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from xlite_runner.bench.metrics import RequestRecord, SpecDecodeStats
from xlite_runner.bench.workload import TimedRequest
from xlite_runner.errors import EngineDeadError, NeverAdmittedError, WorkloadError
from xlite_runner.serving.clock import Clock, HostOverhead
from xlite_runner.serving.core.request import FinishReason, Request
from xlite_runner.serving.core.stats import ServingCounters
from xlite_runner.serving.engine_core import EngineCoreOutputs, ServingEngine
from xlite_runner.serving.output import EngineCoreOutput

_SUCCESSES = (FinishReason.STOP, FinishReason.LENGTH)

NO_OVERHEAD = HostOverhead()


class Observer(Protocol):
    """Is told of every step."""

    def on_step(self, begin: float, end: float, load: StepLoad) -> None:
        """A step has run.

        Args:
            begin: Seconds since the benchmark's start at which it began.
            end: And at which it ended.
            load: What it had to do.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What one step had to do, over all replicas.

    Attributes:
        num_running: Requests that run after the step.
        num_waiting: Requests that wait for their first blocks, or for blocks that were taken away.
        num_tokens: Tokens computed in the step.
        kv_cache_usages: Fraction of each replica's blocks in use, 0 to 1.
        num_finished: Requests of the benchmark that have ended so far.
    """

    num_running: int
    num_waiting: int
    num_tokens: int
    kv_cache_usages: tuple[float, ...]
    num_finished: int


@dataclass(slots=True)
class LoadSummary:
    """Load over the whole benchmark; means are over time, and over replicas.

    Attributes:
        num_steps: Steps that computed tokens.
        num_scheduled_tokens: Tokens that they computed, those computed again after a preemption included.
    """

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    max_num_running: int = 0
    max_num_waiting: int = 0
    max_kv_cache_usage: float = 0.0
    _running_seconds: float = 0.0
    _usage_seconds: float = 0.0
    _seconds: float = 0.0

    def add(self, seconds: float, load: StepLoad) -> None:
        """A step, or a wait for the next request, took so many seconds under this load."""
        if load.num_tokens:
            self.num_steps += 1
            self.num_scheduled_tokens += load.num_tokens
        self.max_num_running = max(self.max_num_running, load.num_running)
        self.max_num_waiting = max(self.max_num_waiting, load.num_waiting)
        usage = sum(load.kv_cache_usages) / len(load.kv_cache_usages)
        self.max_kv_cache_usage = max(self.max_kv_cache_usage, *load.kv_cache_usages)
        self._running_seconds += seconds * load.num_running
        self._usage_seconds += seconds * usage
        self._seconds += seconds

    @property
    def mean_num_running(self) -> float:
        """Mean number of running requests."""
        return self._running_seconds / self._seconds if self._seconds else 0.0

    @property
    def mean_kv_cache_usage(self) -> float:
        """Mean fraction of the KV cache in use."""
        return self._usage_seconds / self._seconds if self._seconds else 0.0


@dataclass(slots=True, kw_only=True)
class BenchmarkRun:
    """What happened.

    Attributes:
        records: Every request, in the order in which they were sent.
        duration: Seconds from the start until the last request ended.
        num_preemptions: Times that a request lost its blocks.
        prefix_cache_queries: Tokens looked up in the prefix cache.
        prefix_cache_hits: Those that were found.
        spec_decode: Draft tokens; None if there were none.
    """

    records: list[RequestRecord]
    duration: float
    load: LoadSummary
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    spec_decode: SpecDecodeStats | None = None


class Benchmark:
    """Sends a workload's requests to an engine, and runs the engine until all have ended.

    Args:
        engine: Ready to serve.
        clock: The engine's.
        vocab_size: Prompts are made of tokens below it.
        max_model_len: Longest sequence; a request that would exceed it is refused, as by vLLM's API.
        max_concurrency: Most requests that are sent and have not ended; None is no limit.
        is_engine_error: Whether an error of a step ends all requests that the engine has; any other is raised.
        host_overhead: What a step costs the host besides launching operators.
        survives_errors: If false, the engine is dead after such an error, as upstream's is, and every later request
            fails at once; if true it goes on, as if it had been started anew in no time.
        observers: Told of every step.
    """

    def __init__(
        self,
        engine: ServingEngine,
        clock: Clock,
        *,
        vocab_size: int,
        max_model_len: int,
        max_concurrency: int | None = None,
        is_engine_error: Callable[[Exception], bool] = lambda _: False,
        host_overhead: HostOverhead = NO_OVERHEAD,
        survives_errors: bool = False,
        observers: Iterable[Observer] = (),
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_concurrency = max_concurrency or math.inf
        self._is_engine_error = is_engine_error
        self._host_overhead = host_overhead
        self._survives_errors = survives_errors
        self._observers = tuple(observers)
        self._coming: deque[TimedRequest] = deque()
        self._under_way: dict[str, RequestRecord] = {}
        self._records: list[RequestRecord] = []
        self._load = LoadSummary()
        self._dead: EngineDeadError | None = None
        self._start = 0.0

    def run(self, requests: Iterable[TimedRequest]) -> BenchmarkRun:
        """Serve all requests, which come in the order of their arrival."""
        self._coming.extend(requests)
        self._start = self._clock.now()
        self._send(0.0, late=False)
        while self._dead is None and (self._coming or self._engine.has_work):
            begin = self._now()
            if not self._engine.has_work:
                self._sleep(begin)
            elif not self._step(begin) and self._engine.stalled_requests():
                self._fail_first_waiting()
        counters = [scheduler.counters for scheduler in self._engine.schedulers]
        return BenchmarkRun(
            records=self._records,
            duration=max((record.end_time or 0.0 for record in self._records), default=0.0),
            load=self._load,
            num_preemptions=sum(counter.num_preemptions for counter in counters),
            prefix_cache_queries=sum(counter.prefix_cache_queries for counter in counters),
            prefix_cache_hits=sum(counter.prefix_cache_hits for counter in counters),
            spec_decode=_spec_decode(counters),
        )

    def _now(self) -> float:
        return self._clock.now() - self._start

    def _sleep(self, begin: float) -> None:
        """Wait for the next request, with nothing to do."""
        self._clock.sleep_until(self._start + self._coming[0].arrival_time)
        end = self._now()
        self._tell(begin, end, self._load_after(()))
        self._send(end, late=False)

    def _step(self, begin: float) -> bool:
        """Run a step; whether anything came of it."""
        num_requests = sum(len(scheduler.running) for scheduler in self._engine.schedulers)
        self._clock.charge(self._host_overhead.of_step(num_requests))
        try:
            results = self._engine.step()
        except Exception as error:
            if not self._is_engine_error(error):
                raise
            self._fail_all(error)
            return True
        end = self._now()
        # Who came during the step met the requests that were under way then; who had to wait is sent when one ends.
        self._send(end, late=False)
        outputs = [output for result in results for output in result.outputs]
        for output in outputs:
            self._receive(output, end)
        self._send(end, late=True)
        load = self._load_after(results)
        self._tell(begin, end, load)
        return bool(load.num_tokens or outputs)

    def _send(self, now: float, *, late: bool) -> None:
        """Hand over the requests that have come, as many as may be under way; late ones were kept waiting until now."""
        coming = self._coming
        while coming and coming[0].arrival_time <= now and len(self._under_way) < self._max_concurrency:
            request = coming.popleft()
            record = RequestRecord(
                req_id=request.req_id,
                start_time=now if late else request.arrival_time,
                prompt_len=request.sample.prompt_len,
            )
            self._records.append(record)
            try:
                self._admit(request)
            except (EngineDeadError, ValueError) as error:
                _fail(record, error, record.start_time)
            else:
                self._under_way[request.req_id] = record

    def _admit(self, request: TimedRequest) -> None:
        if self._dead is not None:
            raise self._dead
        num_tokens = request.sample.prompt_len + request.sampling_params.max_tokens
        if num_tokens > self._max_model_len:
            raise WorkloadError(
                f"prompt and output of {num_tokens} tokens: allowed is at most max_model_len = {self._max_model_len}"
            )
        tokens = request.prompt_token_ids(self._vocab_size)
        arrival_time = request.arrival_time * 1e6
        self._engine.add_request(Request(request.req_id, tokens, request.sampling_params, arrival_time=arrival_time))

    def _receive(self, output: EngineCoreOutput, now: float) -> None:
        record = self._under_way.get(output.request_id)
        if record is None:
            return
        if output.new_token_ids:
            record.chunk_times.append(now)
            record.output_len += len(output.new_token_ids)
        if output.finish_reason is not None:
            record.end_time = now
            if output.finish_reason not in _SUCCESSES:
                record.error = f"finish reason {output.finish_reason.value}"
            del self._under_way[output.request_id]

    def _fail_first_waiting(self) -> None:
        """The request that is first in line needs more blocks than there are: upstream waits forever."""
        for scheduler in self._engine.schedulers:
            if not scheduler.waiting:
                continue
            request = scheduler.waiting.peek()
            num_blocks = scheduler.kv_cache_manager.block_pool.num_blocks - 1
            error = NeverAdmittedError(
                f"{request.num_tokens} tokens do not fit into {num_blocks} blocks: upstream would let this request, "
                "and all behind it, wait forever"
            )
            self._engine.abort_requests([request.request_id])
            _fail(self._under_way.pop(request.request_id), error, self._now())

    def _fail_all(self, error: Exception) -> None:
        now = self._now()
        self._engine.abort_requests(list(self._under_way))
        for record in self._under_way.values():
            _fail(record, error, now)
        self._under_way.clear()
        if not self._survives_errors:
            self._dead = EngineDeadError(f"the engine died at {now:.6f} s: {_first_line(error)}")
            self._send(math.inf, late=False)

    def _load_after(self, results: Sequence[EngineCoreOutputs]) -> StepLoad:
        stats = [scheduler.make_stats() for scheduler in self._engine.schedulers]
        scheduled = [result.scheduler_output for result in results if result.scheduler_output is not None]
        return StepLoad(
            num_running=sum(stat.num_requests_running for stat in stats),
            num_waiting=sum(stat.num_requests_waiting for stat in stats),
            num_tokens=sum(output.total_num_scheduled_tokens for output in scheduled),
            kv_cache_usages=tuple(stat.kv_cache_usage_perc for stat in stats),
            num_finished=len(self._records) - len(self._under_way),
        )

    def _tell(self, begin: float, end: float, load: StepLoad) -> None:
        self._load.add(end - begin, load)
        for observer in self._observers:
            observer.on_step(begin, end, load)


def _spec_decode(counters: Sequence[ServingCounters]) -> SpecDecodeStats | None:
    num_drafts = sum(counter.spec_decode_num_drafts for counter in counters)
    if not num_drafts:
        return None
    per_position: Counter[int] = Counter()
    for counter in counters:
        per_position += counter.spec_decode_num_accepted_tokens_per_pos
    return SpecDecodeStats(
        num_drafts=num_drafts,
        draft_tokens=sum(counter.spec_decode_num_draft_tokens for counter in counters),
        accepted_tokens=sum(counter.spec_decode_num_accepted_tokens for counter in counters),
        per_position_acceptance_rates=tuple(per_position[pos] / num_drafts for pos in sorted(per_position)),
    )


def _fail(record: RequestRecord, error: Exception, now: float) -> None:
    record.end_time = now
    record.error = f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
