"""Asynchronous scheduling: step k + 1 is composed while step k runs. Rules are vLLM's ``AsyncScheduler``'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xlite_runner.serving.core.request import Request, RequestStatus
from xlite_runner.serving.core.scheduler import Scheduler
from xlite_runner.serving.output import SchedulerOutput

PLACEHOLDER_TOKEN = -1
"""Draft token of a step whose drafts only the workers will know."""


class AsyncScheduler(Scheduler):
    """A scheduler that counts on tokens of steps in flight: for each of them a request has placeholders."""

    def schedule(self) -> SchedulerOutput:
        """Compose the next step; what it will give counts from now on."""
        output = super().schedule()
        for req_id in output.num_scheduled_tokens:
            request = self.requests[req_id]
            if not request.is_prefill_chunk:
                request.num_output_placeholders += 1 + len(output.scheduled_spec_decode_tokens.get(req_id, ()))
                request.spec_token_ids = [PLACEHOLDER_TOKEN] * self.num_spec_tokens
        return output

    def _append_output_tokens(self, request: Request, new_token_ids: Sequence[int]) -> Sequence[int]:
        if request.async_tokens_to_discard:
            request.async_tokens_to_discard -= 1
            return ()
        was_running = request.status is RequestStatus.RUNNING
        new_token_ids = super()._append_output_tokens(request, new_token_ids)
        request.num_output_placeholders -= len(new_token_ids)
        if was_running:
            self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
        return new_token_ids

    def _update_draft_token_ids(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:
        """The workers keep their drafts; the next step may already be composed."""
