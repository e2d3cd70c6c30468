"""Adam without moments, against torch's own Adam that is made anew for every step, in float64."""

import pytest
import torch

from colloid.training.megatron.stateless_adam import StatelessAdam


@pytest.mark.parametrize("decoupled", [True, False])
def test_every_step_is_the_first_one_of_a_fresh_adam(decoupled):
    options = {"lr": 0.03, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    torch.manual_seed(0)
    wanted = [torch.nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in (5, 3)]
    found = [torch.nn.Parameter(parameter.detach().clone()) for parameter in wanted]

    def groups(parameters):
        return [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0, "lr": 0.01}]

    stateless = StatelessAdam(kind(groups(found), **options), decoupled=decoupled)
    for _ in range(4):
        for one, other in zip(wanted, found, strict=True):
            one.grad = torch.randn_like(one) * torch.tensor([0.0, 1e-7, 1.0, 1e3, -2.0])[: len(one)]
            other.grad = one.grad.clone()
        kind(groups(wanted), **options).step()
        stateless.step()
    for one, other in zip(wanted, found, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert not stateless.state
