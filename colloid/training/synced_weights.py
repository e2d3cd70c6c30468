"""The weights that the engines were given, kept on the host: the policy that generated a rollout, however far the
trainer is ahead of it.

In the synchronous loop the engines have the weights of the last update. In the asynchronous one a rollout waits in the
buffer, or is under way, while weights are updated, so those of the updates before are kept too: of as many as a token
may be old when it is trained.
"""

from __future__ import annotations

import torch

from colloid.training.reference import ReferenceModel
from colloid.weights.hf_loader import NamedParameters


class SyncedWeights:
    """Copies of the policy, by weight version.

    Args:
        parameters: the policy's, as in `named_parameters`; their weights of now are the first copy.
        version: the weight version of now.
        keeps: of how many versions; each takes as much memory of the host as the parameters do.
    """

    def __init__(self, parameters: NamedParameters, version: int, keeps: int = 1):
        self._parameters, self._keeps = parameters, keeps
        self._copies = {version: ReferenceModel(parameters)}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Of all copies."""
        return [tensor for copy in self._copies.values() for tensor in copy.tensors]

    def synced(self, version: int) -> None:
        """The engines have the policy's weights of now, as this version."""
        if len(self._copies) < self._keeps:
            self._copies[version] = ReferenceModel(self._parameters)
            return
        copy = self._copies.pop(min(self._copies))
        copy.become_policy()
        self._copies[version] = copy

    def of(self, version: int) -> ReferenceModel:
        """The weights of that version; where they are not kept, the newest before it, or else the oldest."""
        before = [kept for kept in self._copies if kept <= version]
        return self._copies[max(before) if before else min(self._copies)]
