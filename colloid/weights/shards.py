"""Where a rank stands among those that hold the model: which shard of a parameter is its own."""

from __future__ import annotations

from dataclasses import dataclass

EXPERTS = ".mlp.experts."
"""Part of the Megatron name of every parameter of a routed expert; those are divided in another way than the rest."""


@dataclass(frozen=True)
class Coordinates:
    """A rank's place in the layout, as far as weights are concerned. The default: the whole model is here."""

    tp_rank: int = 0
    tp_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_size: int = 1
    is_replica: bool = False
    """Another rank, earlier in its data- and context-parallel group, holds the same shards."""
    is_expert_replica: bool = False
    """The same for the experts' shards, in the expert data-parallel group."""

    def shard(self, name: str) -> tuple[int, int]:
        """(this rank's shard, how many there are) of the Megatron parameter `name`."""
        if EXPERTS in name:
            return self.expert_tp_rank, self.expert_tp_size
        return self.tp_rank, self.tp_size

    def holds_copy(self, name: str) -> bool:
        """Whether the parameter `name` is here only because other ranks have it too."""
        return self.is_expert_replica if EXPERTS in name else self.is_replica


WHOLE = Coordinates()
