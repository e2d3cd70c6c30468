"""Another model's weights, kept on the host and swapped into the policy's parameters for one pass: the reference, a
teacher, or the policy of the last weight update.

So there is never a second model on the device, and the reference is computed by the very code that computes the
policy: at the untouched start the KL between them is exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from colloid.weights.hf_loader import NamedParameters


class ReferenceModel:
    """Another set of weights for the policy's parameters.

    Args:
        parameters: the policy's, as in `named_parameters`.
        load: fills the parameters with the reference's weights; None: they are the policy's of now.
    """

    def __init__(self, parameters: NamedParameters, load: Callable[[], None] | None = None):
        self._parameters = [parameter for _, parameter in parameters]
        self._host = [_host_tensor(parameter) for parameter in self._parameters]
        if load is None:
            self.become_policy()
            return
        with self.swapped_in():
            load()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Its weights; while it is swapped in, the policy's."""
        return self._host

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """While it is open the parameters hold the reference's weights. Not to be trained in."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def become_policy(self) -> None:
        """The reference's weights are the policy's from now on. Not while it is swapped in."""
        for host, parameter in zip(self._host, self._parameters, strict=True):
            host.copy_(parameter.data)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Its own inverse. On a CPU the tensors change places; on a device their contents do."""
        for row, parameter in enumerate(self._parameters):
            host = self._host[row]
            if parameter.device.type == "cpu":
                self._host[row], parameter.data = parameter.data, host
            else:
                policy = parameter.data.to("cpu")
                parameter.data.copy_(host)
                host.copy_(policy)


def _host_tensor(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.empty_like(parameter.data, device="cpu", pin_memory=parameter.device.type != "cpu")
