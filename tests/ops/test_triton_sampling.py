"""Triton kernels of serving, launched by name as vendor code does, against loops that follow their sources."""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.sim_only("kernels that are launched by name are the double's"),
    pytest.mark.npu_settings(values="real"),
]

REJECTION = "vllm_ascend.ops.triton.reject_sample"


@pytest.fixture
def launch(npu_device):
    """``launch(name, **arguments)`` with lists and host tensors in the place of device tensors; gives what it wrote."""
    import torch

    from npusim.ops.triton_kernels import KERNELS
    from npusim.ops.triton_kernels import launch as launch_kernel

    def run(name, **arguments):
        on_device = {
            key: torch.as_tensor(value).to(npu_device) if isinstance(value, (list, torch.Tensor)) else value
            for key, value in arguments.items()
        }
        launch_kernel(name, on_device)
        return on_device[KERNELS[name].writes[0]].cpu()

    return run


@pytest.mark.parametrize("module", ["vllm.v1.worker.block_table", "vllm_ascend.ops.triton.compute_slot_mapping"])
def test_slot_mapping(launch, module):
    import torch

    positions = torch.tensor([5, 6, 7, 0, 1, 17])
    slots = launch(
        f"{module}._compute_slot_mapping_kernel",
        num_tokens=6,
        max_num_tokens=9,
        query_start_loc_ptr=torch.tensor([0, 3, 5, 6], dtype=torch.int32),
        positions_ptr=positions,
        block_table_ptr=torch.tensor([[4, 5, 0, 0, 0], [7, 0, 0, 0, 0], [1, 2, 3, 9, 8]], dtype=torch.int32),
        block_table_stride=5,
        block_size=4,
        slot_mapping_ptr=torch.full((9,), 77, dtype=torch.int32),
        TOTAL_CP_WORLD_SIZE=1,
        TOTAL_CP_RANK=0,
        CP_KV_CACHE_INTERLEAVE_SIZE=1,
        PAD_ID=-1,
        BLOCK_SIZE=1024,
    )
    assert slots.tolist() == [5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 7 * 4, 7 * 4 + 1, 8 * 4 + 1, -1, -1, -1]


@pytest.mark.parametrize("rank", [{"tp_rank": 0}, {}])
def test_token_counts_leave_out_padding(launch, rank):
    import torch

    counts = launch(
        "vllm_ascend.ops.triton.bincount.token_bin_counts_and_mask_kernel",
        tokens_ptr=torch.tensor([[0, 2, 2, 4], [3, 4, 4, 4]]),
        vocab_size=4,
        bin_counts_ptr=torch.zeros(2, 4, dtype=torch.int32),
        **rank,
    )
    assert counts.tolist() == [[1, 0, 2, 0], [0, 0, 0, 1]]


def test_penalties(launch):
    import torch

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, generator=generator)
    prompt = torch.rand(3, 7, generator=generator) < 0.4
    counts = torch.randint(3, (3, 7), generator=generator, dtype=torch.int32)
    repetition, frequency, presence = [1.5, 0.5, 1.0], [0.5, -0.25, 0.0], [1.0, 0.0, -2.0]
    penalised = launch(
        "vllm_ascend.ops.triton.penalty.apply_all_penalties_kernel",
        logits_ptr=logits,
        prompt_mask_ptr=prompt,
        output_mask_ptr=counts > 0,
        output_bin_counts_ptr=counts,
        repetition_penalties_ptr=repetition,
        frequency_penalties_ptr=frequency,
        presence_penalties_ptr=presence,
    )
    for row in range(3):
        for token in range(7):
            expected, count = float(logits[row, token]), int(counts[row, token])
            if prompt[row, token] or count:
                expected = expected / repetition[row] if expected > 0 else expected * repetition[row]
            expected -= frequency[row] * count + presence[row] * (count > 0)
            assert float(penalised[row, token]) == pytest.approx(expected, abs=1e-5)


def test_expand(launch):
    expanded = launch(
        f"{REJECTION}.expand_kernel",
        output_ptr=[9, 9, 9, 9, 9],
        input_ptr=[5, 0, 6],
        cu_num_tokens_ptr=[2, 3, 3],
        replace_from=0,
        replace_to=1,
    )
    assert expanded.tolist() == [5, 5, 1, 9, 9]


def test_greedy_with_one_draft_each(launch):
    output = launch(
        f"{REJECTION}.rejection_greedy_sample_spec_len_1_triton",
        output_token_ids_ptr=[[-1, -1], [-1, -1]],
        draft_token_ids_ptr=[3, 4],
        target_argmax_ptr=[3, 5],
        bonus_token_ids_ptr=[[8], [9]],
        vec_len=2,
    )
    assert output.tolist() == [[3, 8], [5, -1]]


def test_greedy_leaves_random_requests_alone(launch):
    output = launch(
        f"{REJECTION}.rejection_greedy_sample_triton",
        output_token_ids_ptr=[[-1] * 3 for _ in range(4)],
        cu_num_draft_tokens_ptr=[2, 4, 4, 5],
        draft_token_ids_ptr=[1, 2, 3, 4, 5],
        target_argmax_ptr=[1, 2, 3, 9, 5],
        bonus_token_ids_ptr=[11, 12, 13, 14],
        is_greedy_ptr=[True, True, True, False],
        max_spec_len=2,
    )
    assert output.tolist() == [[1, 2, 11], [3, 9, -1], [13, -1, -1], [-1, -1, -1]]


def random_arguments():
    """Three requests with 1, 2 and 0 drafts over a vocabulary of 4."""
    return {
        "cu_num_draft_tokens_ptr": [1, 3, 3],
        "draft_token_ids_ptr": [0, 1, 2],
        "target_probs_ptr": [[0.5, 0.5, 0.0, 0.0], [0.25, 0.5, 0.25, 0.0], [0.1, 0.2, 0.3, 0.4]],
        "ENABLE_REDUCE_SAMPLING": False,
    }


@pytest.mark.parametrize(
    ("uniform", "expected"),
    [
        ([0.4, 0.4, 0.2], [[0, 11, -1], [1, 2, 12], [13, -1, -1]]),
        ([0.6, 0.4, 0.9], [[3, -1, -1], [1, 3, -1], [13, -1, -1]]),
        ([0.4, 0.6, 0.0], [[0, 11, -1], [3, -1, -1], [13, -1, -1]]),
    ],
)
def test_random_acceptance(launch, uniform, expected):
    output = launch(
        f"{REJECTION}.rejection_random_sample_kernel",
        output_token_ids_ptr=[[-1] * 3 for _ in range(3)],
        bonus_token_ids_ptr=[[11], [12], [13]],
        recovered_token_ids_ptr=[3, 3, 3],
        uniform_probs_ptr=uniform,
        is_greedy_ptr=[False, False, False],
        ENTROPY_VERIFY=False,
        **random_arguments(),
    )
    assert output.tolist() == expected


@pytest.mark.parametrize("with_draft_probs", [False, True])
def test_recovered_tokens(launch, with_draft_probs):
    """The largest of what is left of each probability over the request's noise."""
    import torch

    arguments, noise = random_arguments(), torch.tensor([[1.0, 1, 1, 1], [4, 1, 1, 0.5], [1, 1, 1, 1]])
    if with_draft_probs:
        arguments["draft_probs_ptr"] = torch.full((3, 4), 0.25)
    output = launch(
        f"{REJECTION}.sample_recovered_tokens_kernel", output_token_ids_ptr=[-1] * 3, q_ptr=noise, **arguments
    )
    # (0.5, 0.5, 0, 0) less the draft 0 or less 0.25 each; the second request's last noise makes token 3 likelier.
    assert output.tolist() == ([0, 1, 3] if with_draft_probs else [1, 2, 3])


def test_unknown_kernels_and_ways_are_refused(launch):
    from npusim.errors import UnmodelledCallError

    with pytest.raises(UnmodelledCallError, match="entropy"):
        launch(
            f"{REJECTION}.rejection_random_sample_kernel",
            output_token_ids_ptr=[[-1]],
            ENTROPY_VERIFY=True,
            **random_arguments(),
        )


def test_drafts_come_from_each_request_s_last_token_that_counts(launch):
    """Of three requests the first keeps its draft, the second loses it, and the third had none."""
    import torch

    arguments = {
        "cu_num_draft_tokens_ptr": torch.tensor([1, 2, 2], dtype=torch.int32),
        "valid_sampled_tokens_count_ptr": torch.tensor([2, 1, 1]),
        "query_start_loc_gpu_ptr": torch.tensor([0, 2, 4, 9], dtype=torch.int32),
        "token_indices_to_sample_ptr": torch.empty(3, dtype=torch.int32),
        "num_rejected_tokens_gpu_ptr": torch.empty(3, dtype=torch.int32),
        "num_reqs": 3,
        "BLOCK_SIZE": 4,
    }
    indices = launch("vllm_ascend.ops.triton.spec_decode.utils.prepare_inputs_padded_kernel", **arguments)
    assert indices.tolist() == [1, 2, 8]
