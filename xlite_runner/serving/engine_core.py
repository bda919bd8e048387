"""The serving loop: schedule, execute, update; one scheduler per data-parallel replica, all in step.

Rules are those of vLLM's ``EngineCore`` and ``DPEngineCoreProc``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from xlite_runner.config import RunnerConfig
from xlite_runner.serving.core.async_scheduler import AsyncScheduler
from xlite_runner.serving.core.request import Request, RequestStatus
from xlite_runner.serving.core.scheduler import Scheduler
from xlite_runner.serving.core.stats import SchedulerStats
from xlite_runner.serving.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput

STEPS_BETWEEN_AGREEMENTS = 32
"""After so many steps the replicas of a mixture of experts agree on whether any has work left (vLLM's constant)."""


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """What one replica does in a step.

    Attributes:
        scheduler_output: What its workers execute; None if it has no requests.
        dummy_batch: Whether they then execute a dummy batch, to take part in the collectives of the other replicas.
    """

    scheduler_output: SchedulerOutput | None
    dummy_batch: bool = False


class Executor(Protocol):
    """Runs one step on all workers."""

    def execute_model(self, steps: Sequence[ReplicaStep]) -> Sequence[ModelRunnerOutput | None]:
        """Execute a step of every replica at the same time; what each gave, None without a scheduler output."""
        ...


@dataclass(frozen=True, slots=True)
class EngineCoreOutputs:
    """What one step brought to one replica.

    Attributes:
        scheduler_output: What it executed; with asynchronous scheduling the outputs are of an earlier step.
        outputs: News of its requests.
        scheduler_stats: Its state after the step.
    """

    scheduler_output: SchedulerOutput | None
    outputs: Sequence[EngineCoreOutput]
    scheduler_stats: SchedulerStats


class _Replica:
    """A scheduler and the steps of it that have been executed and not applied."""

    def __init__(self, scheduler: Scheduler, max_concurrent_batches: int) -> None:
        self.scheduler = scheduler
        self.is_stalled = False
        self._batch_queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._max_concurrent_batches = max_concurrent_batches

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self._batch_queue)

    def schedule(self) -> SchedulerOutput | None:
        if not self.scheduler.has_requests():
            return None
        output = self.scheduler.schedule()
        did_nothing = not (output.num_scheduled_tokens or output.preempted_req_ids or self._batch_queue)
        self.is_stalled = did_nothing and self.scheduler.has_unfinished_requests()
        return output

    def update(
        self, scheduler_output: SchedulerOutput | None, model_runner_output: ModelRunnerOutput | None
    ) -> list[EngineCoreOutput]:
        """Apply the oldest step's results, unless there is room for one more step in flight."""
        if scheduler_output is not None:
            assert model_runner_output is not None
            self._batch_queue.append((scheduler_output, model_runner_output))
            has_more = bool(scheduler_output.num_scheduled_tokens) or self.scheduler.has_requests()
            if has_more and len(self._batch_queue) < self._max_concurrent_batches:
                return []
        return self.scheduler.update_from_output(*self._batch_queue.popleft()) if self._batch_queue else []


class ServingEngine:
    """Serves requests, step by step.

    Args:
        schedulers: One per data-parallel replica.
        executor: Runs their steps.
        lockstep: Whether the replicas' forwards contain common collectives, as those of a mixture of experts do. A
            replica without tokens then runs dummy batches for as long as any replica has work.
        vocab_size: The model's; None checks no token.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        executor: Executor,
        *,
        lockstep: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self.schedulers = list(schedulers)
        self._replicas = [_Replica(scheduler, 1 + isinstance(scheduler, AsyncScheduler)) for scheduler in schedulers]
        self._executor = executor
        self._lockstep = lockstep
        self._engines_running = False
        self._step_counter = 0

    @classmethod
    def from_config(cls, config: RunnerConfig, num_gpu_blocks: Sequence[int], executor: Executor) -> ServingEngine:
        """The engine of a configuration, with each replica's number of blocks of KV cache."""
        scheduler_class = AsyncScheduler if config.scheduler.async_scheduling else Scheduler
        return cls(
            [
                scheduler_class(config.scheduler, config.cache, num_blocks, config.speculative)
                for num_blocks in num_gpu_blocks
            ],
            executor,
            lockstep=config.parallel.data_parallel_size > 1,
            vocab_size=config.model.vocab_size,
        )

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a request runs or waits."""
        return any(scheduler.has_unfinished_requests() for scheduler in self.schedulers)

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would do anything; true for some steps after the last request ended."""
        return self._engines_running or any(replica.has_work for replica in self._replicas)

    def stalled_requests(self) -> list[Request]:
        """Requests for which the last step did nothing, and no later one will unless others end or come.

        One that needs more blocks than there are waits forever, and so do those behind it; upstream's scheduler does
        not tell.
        """
        return [
            request
            for replica in self._replicas
            if replica.is_stalled
            for request in replica.scheduler.requests.values()
        ]

    def add_request(self, request: Request, data_parallel_rank: int | None = None) -> int:
        """Queue a request.

        Args:
            request: Its prompt must leave room for one more token, and for ``min_tokens``.
            data_parallel_rank: The replica to serve it; None takes the one with the least to do, as vLLM counts it.

        Returns:
            The replica's number.

        Raises:
            ValueError: The prompt is too long, or tokens are outside of the vocabulary (upstream's texts),
                ``min_tokens`` does not fit, the id is in use, or no replica has that rank.
        """
        self._check_length(request)
        self._check_vocabulary(request)
        if data_parallel_rank is None:
            scores = [len(scheduler.waiting) * 4 + len(scheduler.running) for scheduler in self.schedulers]
            data_parallel_rank = scores.index(min(scores))
        elif not 0 <= data_parallel_rank < len(self.schedulers):
            raise ValueError(f"data_parallel_rank = {data_parallel_rank}: allowed is 0 to {len(self.schedulers) - 1}")
        if any(request.request_id in scheduler.requests for scheduler in self.schedulers):
            raise ValueError(f"duplicate request id {request.request_id!r}")
        self.schedulers[data_parallel_rank].add_request(request)
        self._replicas[data_parallel_rank].is_stalled = False
        self._engines_running = self._lockstep
        return data_parallel_rank

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests, also while a step with them is in flight; unknown ones are left out."""
        request_ids = list(request_ids)
        return [
            EngineCoreOutput(request.request_id, (), request.status.finish_reason)
            for scheduler in self.schedulers
            for request in scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        ]

    def step(self) -> list[EngineCoreOutputs]:
        """Run one step of all replicas; without work, nothing runs and nothing comes back."""
        if not self.has_work:
            return []
        scheduler_outputs = [replica.schedule() for replica in self._replicas]
        steps = [
            ReplicaStep(output, dummy_batch=self._lockstep and not (output and output.num_scheduled_tokens))
            for output in scheduler_outputs
        ]
        results = self._executor.execute_model(steps)
        all_outputs = [
            EngineCoreOutputs(output, replica.update(output, result), replica.scheduler.make_stats())
            for replica, output, result in zip(self._replicas, scheduler_outputs, results, strict=True)
        ]
        if self._lockstep:
            self._agree_on_end()
        return all_outputs

    def _agree_on_end(self) -> None:
        self._step_counter += 1
        if self._step_counter % STEPS_BETWEEN_AGREEMENTS == 0 and not self.has_unfinished_requests:
            self._engines_running = False
            self._step_counter = 0

    def _check_vocabulary(self, request: Request) -> None:
        if self._vocab_size is None:
            return
        smallest, largest = min(request.prompt_token_ids), max(request.prompt_token_ids)
        for token_id in (smallest, largest):
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(f"Token id {token_id} is out of vocabulary")
        request.sampling_params.verify(self._vocab_size)

    def _check_length(self, request: Request) -> None:
        num_tokens, max_model_len = request.num_prompt_tokens, self.schedulers[0].config.max_model_len
        advice = "Make sure that `max_model_len` is no smaller than the number of text tokens"
        if num_tokens > max_model_len:
            raise ValueError(
                f"The decoder prompt (length {num_tokens}) is longer than the maximum model length of {max_model_len}. "
                f"{advice}."
            )
        if num_tokens == max_model_len:
            raise ValueError(
                f"The decoder prompt (length {num_tokens}) plus the number of requested output tokens (at least 1) is "
                f"longer than the maximum model length of {max_model_len}. "
                f"{advice} (prompt + requested output tokens)."
            )
        if request.min_num_tokens > max_model_len:
            # Upstream takes it; it then never ends, and fails an assertion if it was preempted at its full length.
            raise ValueError(
                f"min_tokens = {request.sampling_params.min_tokens} after a prompt of {num_tokens} tokens: "
                f"allowed is at most {max_model_len - num_tokens}, with max_model_len = {max_model_len}"
            )
