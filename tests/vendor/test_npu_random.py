"""``torch.npu``: the devices' generators, and generators of one's own."""

from __future__ import annotations

import pytest
import torch


def test_seeding(npu_world):
    torch.npu.manual_seed(5)
    assert torch.npu.initial_seed() == 5
    torch.npu.manual_seed_all(6)
    assert torch.npu.initial_seed() == 6
    torch.npu.manual_seed(-1)
    assert torch.npu.initial_seed() == 2**64 - 1
    with pytest.raises(ValueError, match="invalid literal"):
        torch.npu.manual_seed("x")


def test_torch_manual_seed_seeds_the_device(npu_world):
    torch.manual_seed(9)
    assert torch.npu.initial_seed() == 9


def test_state_is_seed_and_offset(npu_world):
    torch.npu.manual_seed(9)
    state = torch.npu.get_rng_state()
    assert state.tolist() == [9, *[0] * 15]
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    torch.npu.manual_seed(10)
    torch.npu.set_rng_state(state)
    assert torch.npu.initial_seed() == 9
    assert torch.equal(torch.npu.get_rng_state_all()[0], state)
    torch.npu.set_rng_state_all(torch.npu.get_rng_state_all())


@pytest.mark.needs("values")
def test_draws_depend_on_seed_and_earlier_draws(npu_world):
    torch.npu.manual_seed(1)
    first, second = torch.rand(4, device="npu"), torch.rand(4, device="npu")
    assert not torch.equal(first, second)
    state = torch.npu.get_rng_state()
    third = torch.rand(4, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="npu"), third)
    torch.npu.manual_seed(1)
    assert torch.equal(torch.rand(4, device="npu"), first)


@pytest.mark.sim_only("the text is ours")
@pytest.mark.parametrize("state", [torch.zeros(16), torch.zeros(8, dtype=torch.uint8)])
def test_broken_states_are_refused(npu_world, state):
    with pytest.raises(RuntimeError, match=r"RNG state must be a torch\.ByteTensor of 16 elements on the host, got"):
        torch.npu.set_rng_state(state)


@pytest.mark.npu_settings(seed=42)
@pytest.mark.sim_only("a world's seed")
def test_the_world_seeds_its_devices(npu_world):
    assert torch.npu.initial_seed() == 42


@pytest.mark.npu_settings(num_devices=2)
@pytest.mark.sim_only("ranks of a world")
def test_a_rank_seeds_only_its_own_device(npu_world):
    def rank(number: int) -> None:
        torch.npu.set_device(number)
        torch.npu.manual_seed_all(number + 5)

    npu_world.run_ranks([lambda: rank(0), lambda: rank(1)])
    assert [runtime.random.seed for runtime in npu_world.runtimes] == [5, 6]
    torch.npu.manual_seed_all(1)
    assert [runtime.random.seed for runtime in npu_world.runtimes] == [1, 1]


def test_generators_of_ones_own(npu_world):
    generator = torch.Generator(device="npu")
    assert generator.device == torch.device("npu")
    assert isinstance(generator, torch.Generator)
    assert generator.initial_seed() == 67280421310721
    assert generator.manual_seed(3) is generator
    assert generator.initial_seed() == 3
    assert torch.Generator("npu:0").device == torch.device("npu", 0)


def test_generators_of_the_host_are_as_ever(npu_world):
    generator = torch.Generator().manual_seed(3)
    assert generator.device == torch.device("cpu")
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.equal(torch.rand(2, generator=generator), torch.rand(2, generator=torch.Generator().manual_seed(3)))


@pytest.mark.needs("values")
def test_draws_from_a_generator_leave_the_devices_own_alone(npu_world):
    torch.npu.manual_seed(1)
    generator = torch.Generator(device="npu").manual_seed(3)
    first = torch.rand(3, generator=generator, device="npu")
    second = torch.empty(3, device="npu").exponential_(generator=generator)
    assert torch.npu.get_rng_state().tolist() == [1, *[0] * 15]
    generator.manual_seed(3)
    assert torch.equal(torch.rand(3, generator=generator, device="npu"), first)
    assert torch.equal(torch.empty(3, device="npu").exponential_(generator=generator), second)
