"""Steps by hand for tests: requests whose prompts and decodes are scheduled as a scheduler would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xlite_runner.serving.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from xlite_runner.serving.sampling_params import SamplingParams


@dataclass
class Client:
    """One request: its tokens, blocks, and how much of it is in the cache."""

    req_id: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    blocks: Sequence[int] = (1,)
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_known: bool = False
    is_preempted: bool = False

    @property
    def num_tokens(self):
        return len(self.prompt) + len(self.output)


def schedule(
    clients: Sequence[Client],
    num_tokens: Mapping[str, int],
    drafts: Mapping[str, Sequence[int]] | None = None,
    finished: Sequence[str] = (),
) -> SchedulerOutput:
    """The scheduler's words for a step of these requests; all their blocks are told at once."""
    chosen = [client for client in clients if client.req_id in num_tokens]
    new = [client for client in chosen if not client.is_known]
    cached = [client for client in chosen if client.is_known]
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(
                req_id=client.req_id,
                prompt_token_ids=client.prompt,
                sampling_params=client.params,
                block_ids=client.blocks,
                num_computed_tokens=client.num_computed,
            )
            for client in new
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[client.req_id for client in cached],
            resumed_req_ids=frozenset(client.req_id for client in cached if client.is_preempted),
            new_block_ids=[client.blocks if client.is_preempted else None for client in cached],
            num_computed_tokens=[client.num_computed for client in cached],
            num_output_tokens=[len(client.output) for client in cached],
        ),
        num_scheduled_tokens={client.req_id: num_tokens[client.req_id] for client in chosen},
        scheduled_spec_decode_tokens=drafts or {},
        finished_req_ids=frozenset(finished),
    )


def apply(clients: Sequence[Client], step: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """What the scheduler does with a step's output."""
    for client in clients:
        if client.req_id in step.num_scheduled_tokens:
            client.is_known, client.is_preempted = True, False
            tokens = output.sampled_token_ids[client.req_id]
            num_drafts = len(step.scheduled_spec_decode_tokens.get(client.req_id, ()))
            num_rejected = num_drafts + 1 - len(tokens) if tokens else 0
            client.num_computed += step.num_scheduled_tokens[client.req_id] - num_rejected
            client.output += tokens


def run_step(execute, clients, num_tokens, drafts=None, finished=()):
    """Schedule, execute by ``execute(SchedulerOutput)``, and apply."""
    step = schedule(clients, num_tokens, drafts, finished)
    output = execute(step)
    apply(clients, step, output)
    return output


def generate(execute, clients, num_outputs, chunk=None):
    """Prefill all in chunks of at most ``chunk`` tokens, then decode until each has ``num_outputs`` tokens."""
    while any(len(client.output) < num_outputs for client in clients):
        wanted = {c.req_id: c.num_tokens - c.num_computed for c in clients if len(c.output) < num_outputs}
        run_step(execute, clients, {req_id: min(n, chunk or n) for req_id, n in wanted.items()})
    return {client.req_id: client.output for client in clients}
