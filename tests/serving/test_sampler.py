"""What the samplers choose, against plain torch on the host."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from xlite_runner.forward_context import AscendDeviceType
from xlite_runner.serving.sampling_params import SamplingParams

VOCAB_SIZE = 40
A2, A5 = AscendDeviceType.A2, AscendDeviceType.A5

pytestmark = [pytest.mark.npu_settings(values="real"), pytest.mark.needs("values")]


@pytest.fixture
def sampling(npu_device):
    """``sampling(params, ...)``: a sampler's parts for these rows; each has a prompt 1, 2, 3 and an output 3, 3, 4."""
    import torch

    from xlite_runner.config import EngineArgs, ModelConfig, check_and_update_config
    from xlite_runner.input_buffers import InputBuffers
    from xlite_runner.serving.output import NewRequestData
    from xlite_runner.serving.sample.rejection_sampler import RejectionSampler
    from xlite_runner.serving.sample.sampler import Sampler
    from xlite_runner.serving.worker.input_batch import InputBatch
    from xlite_runner.serving.worker.request_state import CachedRequestState
    from xlite_runner.serving.worker.step_inputs import SpecDecodeMetadata

    from .conftest import DENSE

    def make(all_params, *, num_drafts=None, drafts=(), device_type=A2):
        args = EngineArgs(max_num_seqs=len(all_params), max_num_batched_tokens=4096, max_model_len=128, block_size=128)
        config = check_and_update_config(args, ModelConfig.from_hf(DENSE | {"vocab_size": VOCAB_SIZE}))
        buffers = InputBuffers(config, npu_device)
        batch = InputBatch(config, buffers, npu_device)
        for row, params in enumerate(all_params):
            data = NewRequestData(
                req_id=str(row),
                prompt_token_ids=[1, 2, 3],
                sampling_params=params,
                block_ids=[],
                num_computed_tokens=0,
            )
            request = CachedRequestState.of(data, npu_device)
            request.output_token_ids = [3, 3, 4]
            batch.add_request(request)
        batch.refresh_metadata()
        sampler = Sampler(device_type, buffers.batch.neg_inf)

        def sample(logits):
            return sampler(logits.to(npu_device), batch.sampling_metadata)

        def verify(logits):
            ends = np.cumsum(np.array(num_drafts) + 1)
            bonus = torch.from_numpy(ends - 1)
            target = torch.tensor([place for place in range(int(ends[-1])) if place not in set(bonus.tolist())])
            spec = SpecDecodeMetadata(
                num_draft_tokens=np.array(num_drafts, dtype=np.int32),
                draft_token_ids=torch.tensor([token for row in drafts for token in row], dtype=torch.int32).to("npu"),
                draft_rows=np.repeat(np.arange(len(num_drafts)), num_drafts),
                target_logits_indices=target.to(npu_device),
                bonus_logits_indices=bonus.to(npu_device),
                cu_num_draft_tokens=torch.from_numpy(np.cumsum(num_drafts, dtype=np.int32)).to(npu_device),
                cu_num_sampled_tokens=torch.from_numpy(np.cumsum(np.array(num_drafts) + 1, dtype=np.int32)).to(
                    npu_device
                ),
            )
            return RejectionSampler(sampler)(logits.to(npu_device), batch.sampling_metadata, spec, drafts)

        return SimpleNamespace(sample=sample, verify=verify, batch=batch)

    return make


def random_logits(num_rows, seed=0):
    import torch

    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def penalised(logits, params):
    """The penalties' definition, token by token."""
    logits = logits.clone()
    for token in range(VOCAB_SIZE):
        count = [3, 3, 4].count(token)
        if count or token in (1, 2, 3):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return logits


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"repetition_penalty": 1.7, "presence_penalty": 1.5, "frequency_penalty": -0.7},
        {"allowed_token_ids": (5, 6, 39)},
        {"min_tokens": 9, "stop_token_ids": (8, 4000)},
    ],
    ids=["plain", "penalties", "allowed", "minimal length"],
)
def test_greedy_choice(sampling, params):
    import torch

    made = SamplingParams(temperature=0.0, **params)
    logits = random_logits(6)
    logits[:, 8] += 4 * ("min_tokens" in params)
    expected = []
    for row in logits:
        row = penalised(row, made)
        if "allowed_token_ids" in params:
            row[[token for token in range(VOCAB_SIZE) if token not in params["allowed_token_ids"]]] = -math.inf
        if "min_tokens" in params:
            row[[7, 8]] = -math.inf  # 7 is the model's end of sequence
        expected.append(int(row.argmax()))
    sampled = sampling([made] * 6).sample(logits).sampled_token_ids
    assert sampled.dtype == torch.int32
    assert sampled.tolist() == [[token] for token in expected]


def test_logprobs_are_of_the_logits_as_they_are(sampling):
    """Before penalties; most probable tokens, and the rank of the chosen one."""
    import torch

    logits = random_logits(3)
    params = SamplingParams(temperature=0.0, logprobs=4, allowed_token_ids=(11, 12, 13))
    output = sampling([params] * 3).sample(logits)
    expected = logits.log_softmax(-1)
    chosen = output.sampled_token_ids.cpu().long()
    top = expected.topk(4)
    assert output.logprobs.token_ids.cpu().tolist() == torch.cat([chosen, top.indices], 1).tolist()
    torch.testing.assert_close(output.logprobs.logprobs.cpu(), torch.cat([expected.gather(1, chosen), top.values], 1))
    ranks = (expected > expected.gather(1, chosen)).sum(1) + 1
    assert output.logprobs.ranks.cpu().tolist() == ranks.tolist()


def kept(logits, params):
    """Tokens that the filters leave, and their probabilities."""
    import torch

    probs = torch.softmax(logits / params.temperature, -1)
    if params.min_p:
        probs[probs < params.min_p * probs.max()] = 0
        probs /= probs.sum()
    order = probs.argsort(descending=True)
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0
        probs /= probs.sum()
    before = probs[order].cumsum(0) - probs[order]
    probs[order[before > params.top_p]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("device_type", [A2, A5])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.8}, {"min_p": 0.2}])
def test_distribution_of_random_choices(sampling, params, device_type):
    """Frequencies of 3000 draws within five standard deviations."""
    if device_type is A5 and "top_k" in params and "top_p" in params:
        params = params | {"top_p": 1.0}  # upstream's torch path sums unfiltered probabilities; see below
    num_draws = 3000
    made = SamplingParams(temperature=1.5, **params)
    logits = random_logits(1).expand(num_draws, -1)
    sampled = sampling([made] * num_draws, device_type=device_type).sample(logits).sampled_token_ids
    counts = Counter(sampled.flatten().tolist())
    for token, prob in enumerate(kept(logits[0].clone(), made).tolist()):
        deviation = math.sqrt(num_draws * prob * (1 - prob))
        assert abs(counts[token] - num_draws * prob) <= 5 * deviation + 1e-3, token


def test_greedy_and_random_rows_side_by_side(sampling):
    logits = random_logits(4)
    greedy, random = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)
    sampled = sampling([greedy, random, greedy, random]).sample(logits).sampled_token_ids.flatten().tolist()
    assert [sampled[0], sampled[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]


def test_a_seed_decides_a_row_whatever_its_neighbours_are(sampling):
    logits = random_logits(1).expand(5, -1)
    seeded, free = SamplingParams(seed=11), SamplingParams()
    alone = sampling([seeded]).sample(logits[:1]).sampled_token_ids.flatten().tolist()
    among = sampling([free, free, seeded, free, seeded]).sample(logits).sampled_token_ids.flatten().tolist()
    assert alone[0] == among[2] == among[4]


# ---- drafts


def test_greedy_drafts_are_kept_while_they_are_the_most_probable(sampling):
    logits = random_logits(7)
    best = logits.argmax(-1).tolist()
    wrong = (best[3] + 1) % VOCAB_SIZE
    greedy = SamplingParams(temperature=0.0)
    # Row 0: both drafts right. Row 1: the first one wrong. Row 2: no draft.
    made = sampling([greedy] * 3, num_drafts=[2, 2, 0], drafts=[best[0:2], [wrong, best[4]], []])
    output = made.verify(logits).sampled_token_ids.tolist()
    assert output == [best[0:3], [best[3], -1, -1], [best[6], -1, -1]]


def test_random_drafts_leave_the_distribution_as_it_is(sampling):
    """Kept with the target's probability, else replaced: together the target's own distribution, whatever the draft."""
    num_rows, draft = 1500, 17
    params = SamplingParams(temperature=1.0, top_k=6)
    logits = random_logits(1).expand(2 * num_rows, -1).clone()
    expected = kept(logits[0].clone(), params).tolist()
    draft = max(range(VOCAB_SIZE), key=lambda token: expected[token])
    made = sampling([params] * num_rows, num_drafts=[1] * num_rows, drafts=[[draft]] * num_rows)
    output = made.verify(logits).sampled_token_ids.tolist()
    counts = Counter(first for first, _ in output)
    for token, prob in enumerate(expected):
        deviation = math.sqrt(num_rows * prob * (1 - prob))
        assert abs(counts[token] - num_rows * prob) <= 5 * deviation + 1e-3, token
    assert all((second == -1) == (first != draft) for first, second in output)


def test_penalties_count_the_drafts_before(sampling):
    """The second draft is the same token as the first, which counts once more then."""
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    logits = random_logits(1).expand(3, -1).clone()
    logits[:, 20] = logits.max() + 3
    logits[:, 21] = logits[0, 20] - 3
    output = sampling([params], num_drafts=[2], drafts=[[20, 20]]).verify(logits).sampled_token_ids.tolist()
    assert output == [[20, 20, 21]]  # 4: penalised by 0, 2, 4


def test_logprobs_of_drafts(sampling):
    import torch

    logits = random_logits(3)
    best = logits.argmax(-1).tolist()
    params = SamplingParams(temperature=0.0, logprobs=2)
    output = sampling([params] * 2, num_drafts=[1, 0], drafts=[[best[0]], []]).verify(logits)
    assert output.sampled_token_ids.tolist() == [[best[0], best[1]], [best[2], -1]]
    expected = logits.log_softmax(-1)
    rows = output.logprobs.logprobs.cpu()
    for place, row in ((0, 0), (1, 1), (2, 2)):
        torch.testing.assert_close(rows[place, 0], expected[row, best[row]])
