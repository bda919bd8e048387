"""An executor that executes one step of each shape, and does the others again from what that one did to the devices.

Which steps may be repeated is decided by what was recorded (``npusim/step_recorder.py``). Here is decided which steps
are alike: those of greedy requests with the same numbers of tokens, requests and unfinished prompts, on devices whose
memory is in the same state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol

from xlite_runner.serving.engine_core import ReplicaStep
from xlite_runner.serving.executor import RunFunctions, WorkerExecutor
from xlite_runner.serving.output import ModelRunnerOutput, SchedulerOutput
from xlite_runner.serving.sampling_params import SamplingParams
from xlite_runner.serving.worker.step_runner import EMPTY_MODEL_RUNNER_OUTPUT, StepRunner
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
        self._executor = WorkerExecutor(workers, 1, run_ranks)
        self._run_ranks = run_ranks
        self._recorder = recorder
        self._tokens = tokens
        self._effects: OrderedDict[Hashable, Any] = OrderedDict()
        self._uneven: set[str] = set()

    def execute_model(self, steps: Sequence[ReplicaStep]) -> list[ModelRunnerOutput | None]:
        """Execute or repeat a step; see :class:`xlite_runner.serving.engine_core.Executor`."""
        (step,) = steps
        output = step.scheduler_output
        if output is None or not self._may_be_alike(output):
            self.num_executed_steps += bool(output and output.num_scheduled_tokens)
            return self._executor.execute_model(steps)
        runners = [worker.model_runner.steps for worker in self._workers]
        for runner in runners:
            runner.update_states(output)
        if not output.num_scheduled_tokens:
            return [EMPTY_MODEL_RUNNER_OUTPUT]
        shape = _Shape(runners[0], output)
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
        functions = [partial(runner.execute_batch, output) for runner in runners]
        executed, effect = self._recorder.record(lambda: self._run_ranks(functions))
        if effect is not None:
            self._effects[key] = effect
            if len(self._effects) > MAX_EFFECTS:
                self._effects.popitem(last=False)
        return [executed[0]]

    def _may_be_alike(self, output: SchedulerOutput) -> bool:
        """Whether all requests of the step are sampled greedily and nothing else is asked of them."""
        self._uneven -= output.finished_req_ids
        self._uneven |= {data.req_id for data in output.scheduled_new_reqs if not _is_plain(data.sampling_params)}
        return not self._uneven and not output.scheduled_spec_decode_tokens


class _Shape:
    """What decides how a step's operators look; made after the batch was brought up to date."""

    def __init__(self, runner: StepRunner, output: SchedulerOutput) -> None:
        batch = runner.batch
        num_reqs = batch.num_reqs
        scheduled = output.num_scheduled_tokens
        self.lens: list[int] = [scheduled[request.req_id] for request in batch.requests]
        self.cached_lens: list[int] = batch.num_computed_tokens[:num_reqs].tolist()
        ends = zip(self.cached_lens, self.lens, batch.num_tokens[:num_reqs].tolist(), strict=True)
        self.discarded_rows: list[int] = [row for row, (start, new, end) in enumerate(ends) if start + new < end]
        is_decode = max(self.lens) == 1
        has_context = any(self.cached_lens)
        self.key: Hashable = (sum(self.lens), num_reqs, len(self.discarded_rows), is_decode, has_context)


def _is_plain(params: SamplingParams) -> bool:
    return params.is_greedy and params == SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        seed=params.seed,
    )
