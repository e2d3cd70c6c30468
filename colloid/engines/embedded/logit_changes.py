"""What a sample's parameters do to its logits before a token is drawn: penalties on its own output, and biases.

As in SGLang: frequency and presence penalties are subtracted, then the repetition penalty divides what is positive and
multiplies what is negative, then biases are added; all before the temperature. Prompts are not counted.

Shapes: `V` vocabulary.
"""

import torch

from colloid.engines.contract_generate import SamplingParams


class LogitChanges:
    """Those of one sample; `count` is told of every token that it got."""

    def __init__(self, params: SamplingParams):
        self._params = params
        self._counts: dict[int, int] = {}
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)

    def count(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1

    def apply(self, logits_V: torch.Tensor, temperature: float) -> torch.Tensor:
        """A changed copy of logits [V] that were divided by `temperature` already."""
        changed, params = logits_V.clone(), self._params
        if self._counts:
            ids = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            penalty = params.frequency_penalty * counts + params.presence_penalty
            values = changed[ids] - penalty / temperature
            factor = params.repetition_penalty
            changed[ids] = torch.where(values < 0, values * factor, values / factor)
        if len(self._bias_ids):
            changed[self._bias_ids] += self._bias / temperature
        return changed
