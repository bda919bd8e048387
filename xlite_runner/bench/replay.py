"""An executor that executes one step of each shape, and does the others again from what that one did to the devices.

Which steps may be repeated is decided by what was recorded (``npusim/step_recorder.py``). Here is decided which steps
are alike: those with the same numbers of tokens, requests and unfinished prompts, sampled by the same operators, on
devices whose memory is in the same state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol

from xlite_runner.serving.engine_core import ReplicaStep
from xlite_runner.serving.executor import RunFunctions
from xlite_runner.serving.output import ModelRunnerOutput, SchedulerOutput
from xlite_runner.serving.sample.sampling_metadata import SamplingMetadata
from xlite_runner.serving.sampling_params import SamplingParams
from xlite_runner.serving.worker.input_batch import InputBatch
from xlite_runner.worker import NPUWorker

MAX_EFFECTS = 4096
"""Steps that are remembered; the one that was needed least recently goes first."""


class Recorder(Protocol):
    """What records and repeats steps of all ranks; effects are opaque here."""

    def state(self) -> str:
        """Identifies the memory of all devices."""
        ...

    def record(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        """Execute a step; returns its result, and its effect or None if it cannot be repeated."""
        ...

    def repeat(self, effect: Any, lens: Sequence[int], cached_lens: Sequence[int]) -> bool:
        """Do what a recorded step did, with other lengths; whether it was done."""
        ...


class ReplayingExecutor:
    """Executes the steps of one replica on all its workers.

    Args:
        workers: By rank.
        run_ranks: How they run.
        recorder: Knows what steps do to the devices.
        tokens: Tokens that a rank samples in a repeated step, for so many requests.

    Attributes:
        num_replayed_steps: Steps that were not executed.
        num_executed_steps: Those that were.
    """

    def __init__(
        self,
        workers: Sequence[NPUWorker],
        run_ranks: RunFunctions,
        recorder: Recorder,
        tokens: Callable[[int, int], Sequence[int]],
    ) -> None:
        self.num_replayed_steps = 0
        self.num_executed_steps = 0
        self._workers = workers
        self._run_ranks = run_ranks
        self._recorder = recorder
        self._tokens = tokens
        self._effects: OrderedDict[Hashable, Any] = OrderedDict()
        self._uneven: set[str] = set()

    def execute_model(self, steps: Sequence[ReplicaStep]) -> list[ModelRunnerOutput | None]:
        """Execute or repeat a step; see :class:`xlite_runner.serving.engine_core.Executor`."""
        (step,) = steps
        output = step.scheduler_output
        if output is None:
            return [None]
        runners = [worker.model_runner.steps for worker in self._workers]
        for runner in runners:
            runner.update_states(output)
        execute = partial(self._run_ranks, [partial(runner.execute_batch, output) for runner in runners])
        batch, may_be_alike = runners[0].batch, self._may_be_alike(output)
        if not output.num_scheduled_tokens or batch.must_upload_metadata or not may_be_alike:
            self.num_executed_steps += bool(output.num_scheduled_tokens)
            return [execute()[0]]
        for runner in runners:
            runner.batch.refresh_metadata()
        shape = _Shape(batch, output)
        key = self._recorder.state(), shape.key
        effect = self._effects.get(key)
        if effect is not None and self._recorder.repeat(effect, shape.lens, shape.cached_lens):
            self._effects.move_to_end(key)
            self.num_replayed_steps += 1
            results = [
                runner.repeat_batch(self._tokens(rank, len(shape.lens)), shape.discarded_rows)
                for rank, runner in enumerate(runners)
            ]
            return [results[0]]
        self.num_executed_steps += 1
        executed, effect = self._recorder.record(execute)
        if effect is not None:
            self._effects[key] = effect
            if len(self._effects) > MAX_EFFECTS:
                self._effects.popitem(last=False)
        return [executed[0]]

    def _may_be_alike(self, output: SchedulerOutput) -> bool:
        """Whether what the requests of the step ask for takes the same memory and time in every such step."""
        self._uneven -= output.finished_req_ids
        self._uneven |= {data.req_id for data in output.scheduled_new_reqs if not _is_even(data.sampling_params)}
        return not self._uneven and not output.scheduled_spec_decode_tokens


class _Shape:
    """What decides how a step's operators look; made after the batch was brought up to date."""

    def __init__(self, batch: InputBatch, output: SchedulerOutput) -> None:
        num_reqs = batch.num_reqs
        scheduled = output.num_scheduled_tokens
        self.lens: list[int] = [scheduled[request.req_id] for request in batch.requests]
        self.cached_lens: list[int] = batch.num_computed_tokens[:num_reqs].tolist()
        ends = zip(self.cached_lens, self.lens, batch.num_tokens[:num_reqs].tolist(), strict=True)
        self.discarded_rows: list[int] = [row for row, (start, new, end) in enumerate(ends) if start + new < end]
        is_decode = max(self.lens) == 1
        has_context = any(self.cached_lens)
        batch_key = (sum(self.lens), num_reqs, len(self.discarded_rows), is_decode, has_context)
        self.key: Hashable = (batch_key, _sampling_key(batch.sampling_metadata))


def _sampling_key(metadata: SamplingMetadata) -> Hashable:
    """Which operators sample the rows of a batch, of requests that are even."""
    if metadata.all_greedy:
        return "greedy"
    filters = (metadata.top_p, metadata.top_k, metadata.min_p, metadata.allowed_token_ids_mask)
    return metadata.all_random, *(tensor is None for tensor in filters)


def _is_even(params: SamplingParams) -> bool:
    """Whether sampling takes the same in each step.

    Penalties count tokens that become more, minimal lengths end, log probabilities have values, and a generator of the
    request's own is drawn from.
    """
    return (
        not (params.presence_penalty or params.frequency_penalty or params.min_tokens)
        and params.repetition_penalty == 1
        and params.logprobs is None
        and params.prompt_logprobs is None
        and (params.seed is None or params.is_greedy)
    )
