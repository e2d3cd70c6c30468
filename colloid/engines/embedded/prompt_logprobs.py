"""Log-probs of a prompt's own tokens (`logprob_start_len`), taken from the hidden states of its prefill.

As in SGLang a request gets an entry for each prompt token from `logprob_start_len` on, the first of them None, and the
temperature of sampling does not enter: theirs is 1, or `input_logprob_temperature`, which SGLang has not. Who asks
for them shares no prompt with others: what is in the cache already has no hidden states.

Shapes: `T` tokens of a chunk, `H` hidden, `c` rows of a block, `V` vocabulary.
"""

import math

import torch

from colloid.engines.contract_fields import BadRequest
from colloid.engines.contract_generate import GenerateInput
from colloid.engines.embedded.model import Model
from colloid.engines.embedded.request import Alternatives, PromptLogProbs, Sequence
from colloid.engines.embedded.sampling import alternatives

BLOCK_ELEMENTS = 1 << 23
"""Logits that are held at a time: 32 MB of float32."""


def asked_for(prompt: GenerateInput, prompt_ids: tuple[int, ...]) -> PromptLogProbs | None:
    """What a request wants of its prompt; None: nothing.

    Raises:
        BadRequest: it starts behind the prompt.
    """
    start = prompt.logprob_start_len
    if not prompt.return_logprob or start < 0:
        return None
    if start >= len(prompt_ids):
        raise BadRequest(f"logprob_start_len ({start}) must be less than the prompt's {len(prompt_ids)} tokens")
    count = len(prompt_ids) - start
    others = Alternatives(prompt.top_logprobs_num, prompt.token_ids_logprob, [None] * count, [None] * count)
    return PromptLogProbs(start, prompt.input_logprob_temperature, [None] * count, others)


def record(model: Model, sequence: Sequence, hidden: torch.Tensor, first: int, min_rows: int) -> None:
    """Fills in the log-probs that a chunk of the prompt predicts.

    Args:
        hidden: [T, H], of the prompt's positions `first` to `first + T`.
        min_rows: that a product of the model needs.
    """
    wanted = sequence.prompt_log_probs
    begin = max(first, wanted.start)
    end = min(first + len(hidden), len(sequence.prompt_ids) - 1)
    block = max(min_rows, BLOCK_ELEMENTS // model.config.vocab_size)
    for low in range(begin, end, block):
        high = min(low + block, end)
        targets = sequence.prompt_ids[low + 1 : high + 1]
        logits_cV = _logits(model, hidden[low - first : high - first], wanted.temperature, min_rows)
        if wanted.alternatives.wanted:
            _record_alternatives(wanted.alternatives, logits_cV, low + 1 - wanted.start)
        wanted.values[low + 1 - wanted.start : high + 1 - wanted.start] = _log_probs(logits_cV, targets)


def _record_alternatives(others: Alternatives, logits_cV: torch.Tensor, first: int) -> None:
    for row, logits_V in enumerate(logits_cV, first):
        others.top[row], others.chosen[row] = alternatives(logits_V, others.num_top, others.ids)


def _logits(model: Model, hidden: torch.Tensor, temperature: float, min_rows: int) -> torch.Tensor:
    count = len(hidden)
    if count < min_rows:
        hidden = torch.cat([hidden, hidden[-1:].expand(min_rows - count, -1)])
    logits_cV = model.logits(hidden)[:count]
    if temperature != 1.0:
        logits_cV = logits_cV / temperature
    return logits_cV


def _log_probs(logits_cV: torch.Tensor, targets: tuple[int, ...]) -> list[float]:
    """Of each row's target; overwrites the logits."""
    largest = logits_cV.amax(-1, keepdim=True)
    at_target = logits_cV.gather(1, torch.tensor(targets)[:, None]) - largest
    totals = logits_cV.sub_(largest).exp_().sum(-1).tolist()
    # math.log, because a vectorized logarithm rounds by an element's place in its vector.
    return [
        value - math.log(total) if total > 0 else math.nan
        for value, total in zip(at_target[:, 0].tolist(), totals, strict=True)
    ]
