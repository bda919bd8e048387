"""Random serving programs, and what a scheduler makes of them, in plain values: upstream's and ours must do the same.

The model is a rule: its token at a position of a request follows from the request's name and the position.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol
from zlib import crc32

VOCABULARY = 8
EOS = 0
MAX_STEPS = 120


@dataclass
class RequestProgram:
    """One request."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = True
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str | None = None
    prompt_logprobs: int | None = None


@dataclass
class Program:
    """Settings of a scheduler, and by step the requests that come, those that are aborted, and resets of the cache."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    long_prefill_token_threshold: int
    scheduler_reserve_full_isl: bool
    num_drafts: int
    asynchronous: bool
    arrivals: dict[int, list[RequestProgram]] = field(default_factory=dict)
    aborts: dict[int, list[str]] = field(default_factory=dict)
    resets: dict[int, bool] = field(default_factory=dict)
    """Step to whether running requests are preempted for it."""

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Program:
        """The inverse of :meth:`plain`, also after JSON made texts of the steps' numbers."""
        program = cls(**values)
        program.arrivals = {int(k): [RequestProgram(**request) for request in v] for k, v in program.arrivals.items()}
        program.aborts = {int(k): v for k, v in program.aborts.items()}
        program.resets = {int(k): v for k, v in program.resets.items()}
        return program


def random_program(seed: int) -> Program:
    """A program that is small in everything, so that limits are met."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    max_num_seqs = rng.randint(1, 8)
    chunked = rng.random() < 0.8
    max_model_len = rng.randint(4, 16) * block_size
    program = Program(
        num_blocks=rng.randint(4, 60),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, 64) if chunked else max_model_len + rng.randint(8, 40),
        max_model_len=max_model_len,
        policy=rng.choice(["fcfs", "priority"]),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=rng.random() < 0.7,
        long_prefill_token_threshold=rng.choice([0, 0, 0, 3, 10]),
        scheduler_reserve_full_isl=rng.random() < 0.7,
        num_drafts=rng.choice([0, 0, 1, 3]),
        asynchronous=rng.random() < 0.4,
    )
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(0, max_model_len - 2))] for _ in range(3)]
    for number in range(rng.randint(1, 16)):
        prompt = rng.choice(prefixes) + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, max_model_len // 2))]
        prompt = prompt[: max_model_len - 1]
        max_tokens = rng.randint(1, 24)
        # Beyond the longest sequence min_tokens would keep a request from ever ending, and upstream's scheduler fails.
        most_min_tokens = min(max_tokens, max_model_len - len(prompt))
        request = RequestProgram(
            request_id=f"r{number}",
            prompt=prompt,
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, rng.randint(0, most_min_tokens)]),
            stop_token_ids=rng.choice([[], [], [3], [3, 5]]),
            ignore_eos=rng.random() < 0.7,
            priority=rng.choice([0, 0, 1, 2]),
            arrival_time=float(rng.randint(0, 3)),
            cache_salt=rng.choice([None, None, None, "salt"]),
            prompt_logprobs=rng.choice([None] * 9 + [0]),
        )
        step = rng.randint(0, 20)
        program.arrivals.setdefault(step, []).append(request)
        if rng.random() < 0.15:
            program.aborts.setdefault(step + rng.randint(0, 12), []).append(request.request_id)
    if rng.random() < 0.2:
        program.resets[rng.randint(2, 25)] = rng.random() < 0.5
    return program


class Adapter(Protocol):
    """A scheduler in plain values."""

    def add(self, request: RequestProgram) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> None:
        """End a request."""

    def reset(self, reset_running_requests: bool) -> bool:
        """Reset the prefix cache."""

    def schedule(self) -> dict[str, Any]:
        """The next step."""

    def update(self, sampled: Mapping[str, list[int]], drafts: Mapping[str, list[int]]) -> list[Any]:
        """Apply the results of the oldest step; request, new tokens, reason, stop reason of each."""

    def state(self) -> dict[str, Any]:
        """Queues and blocks."""

    def has_requests(self) -> bool:
        """Whether there is another step."""


def token_at(request_id: str, position: int) -> int:
    """What the model says."""
    return crc32(f"{request_id} {position}".encode()) % VOCABULARY


def draft_for(request_id: str, position: int) -> int:
    """What the drafter proposes: right at two of three positions."""
    right = token_at(request_id, position)
    return right if crc32(f"draft {request_id} {position}".encode()) % 3 else (right + 1) % VOCABULARY


@dataclass
class _Row:
    num_tokens: int
    num_computed: int


class Model:
    """Executes steps; knows how many tokens each request has."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._rows: dict[str, _Row] = {}

    def execute(self, step: Mapping[str, Any]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Sampled tokens and drafts by request."""
        for req_id, prompt, _, num_computed in step["new"]:
            self._rows[req_id] = _Row(len(prompt), num_computed)
        cached = step["cached"]
        for req_id, num_computed in zip(cached["req_ids"], cached["num_computed_tokens"], strict=True):
            if req_id in cached["resumed_req_ids"]:
                self._rows[req_id] = _Row(len(cached["all_token_ids"][req_id]), num_computed)
        sampled = {}
        for req_id, num_tokens in step["num_scheduled_tokens"]:
            num_drafts = len(dict(step["spec_decode_tokens"]).get(req_id, ()))
            sampled[req_id] = self._sample(req_id, self._rows[req_id], num_tokens - num_drafts, num_drafts)
        drafts = {
            req_id: [draft_for(req_id, self._rows[req_id].num_tokens + i) for i in range(self._num_drafts)]
            for req_id in (sampled if self._num_drafts else ())
        }
        return sampled, drafts

    def _sample(self, req_id: str, row: _Row, num_tokens: int, num_drafts: int) -> list[int]:
        row.num_computed += num_tokens
        if row.num_computed < row.num_tokens:
            return []
        first = row.num_tokens
        num_accepted = 0
        while num_accepted < num_drafts and draft_for(req_id, first + num_accepted) == token_at(
            req_id, first + num_accepted
        ):
            num_accepted += 1
        row.num_tokens += 1 + num_accepted
        row.num_computed += num_accepted
        return [token_at(req_id, first + i) for i in range(1 + num_accepted)]


def drive(program: Program, adapter: Adapter, trace: list[Any]) -> None:
    """Run a program to its end, or for ``MAX_STEPS``, and write down everything; nothing scheduled is a step, too."""
    model = Model(program.num_drafts)
    in_flight: deque[tuple[dict[str, list[int]], dict[str, list[int]]]] = deque()
    depth = 2 if program.asynchronous else 1
    last_event = max([*program.arrivals, *program.aborts, *program.resets], default=0)
    for number in range(MAX_STEPS):
        if number > last_event and not adapter.has_requests() and not in_flight:
            break
        for request in program.arrivals.get(number, ()):
            adapter.add(request)
        for request_id in program.aborts.get(number, ()):
            adapter.abort(request_id)
        if number in program.resets:
            trace.append(["reset", adapter.reset(program.resets[number])])
        executed = False
        if adapter.has_requests():
            step = adapter.schedule()
            executed = bool(step["num_scheduled_tokens"])
            trace.append(["step", number, step, adapter.state()])
            in_flight.append(model.execute(step))
        if in_flight and (len(in_flight) == depth or not (executed or adapter.has_requests())):
            trace.append(["outputs", adapter.update(*in_flight.popleft()), adapter.state()])


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    """Where two traces part, None if they do not."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return f"entry {index}:\n  ours   {mine}\n  theirs {other}"
    if len(ours) != len(theirs):
        return f"ours has {len(ours)} entries, theirs {len(theirs)}"
    return None


def digest(trace: Sequence[Any]) -> str:
    """A short name for all that is in a trace."""
    return hashlib.sha256(json.dumps(trace, separators=(",", ":")).encode()).hexdigest()[:16]
