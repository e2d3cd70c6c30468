"""A layer of experts: the router chooses some for every token, and each expert computes the rows that chose it.

Routing is in float32, as in Hugging Face, whatever the model's dtype. A token's result is the sum of its experts'
outputs in the order of its own choice, and every product has at least `min_rows` rows: so it does not depend, bit by
bit, on which other tokens there are and what they chose.

Shapes: `T` packed tokens, `H` hidden, `E` experts, `C` experts chosen a token.
"""

import torch
import torch.nn.functional as F

from colloid.engines.embedded.linear import MIN_ROWS, GatedMlp, PackedLinear
from colloid.engines.embedded.model_config import ExpertsConfig

# The last elements of a tensor go through another exponential: a multiple of this many columns has none of these.
COLUMNS = 64


class ExpertMlp:
    """The weights of one layer's router, experts and (where the family has them) shared experts."""

    def __init__(self, config: ExpertsConfig):
        self.config = config
        self.min_rows = MIN_ROWS
        self.router: PackedLinear | None = None  # float32
        self.choice_bias: torch.Tensor | None = None  # [E] float32
        self.experts = [GatedMlp(config.inner) for _ in range(config.num_experts)]
        self.shared = GatedMlp(config.shared_inner) if config.shared_inner else None

    def __call__(self, x: torch.Tensor, record: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, H] -> [T, H]. `record` [T, C]: where the numbers of the chosen experts are written."""
        chosen, weights = self.route(x)
        if record is not None:
            record.copy_(chosen)
        out = self._run_experts(x, chosen, weights).to(x.dtype)
        return out if self.shared is None else out + self.shared(x)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> (experts [T, C] int64, their weights [T, C] float32)."""
        c = self.config
        logits = self.router(x.float())
        if c.scores == "softmax":
            weights, chosen = torch.softmax(logits, -1).topk(c.num_chosen, -1)
        else:
            padding = -c.num_experts % COLUMNS
            scores = F.pad(logits, (0, padding)).sigmoid_()[:, : c.num_experts]
            chosen = self._within_groups(scores + self.choice_bias).topk(c.num_chosen, -1)[1]
            weights = scores.gather(1, chosen)
        if c.normalized:
            # The small number is the sigmoid routers'; next to a sum of softmax probabilities it is nothing.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * c.scaling

    def _within_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """scores [T, E], those outside of the best groups made -inf; a group's score is the sum of its best two."""
        c = self.config
        if c.num_groups == 1:
            return scores
        grouped = scores.view(len(scores), c.num_groups, -1)
        best = grouped.topk(2, -1)[0].sum(-1).topk(c.num_groups_chosen, -1)[1]
        excluded = torch.ones(len(scores), c.num_groups, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(excluded[..., None], float("-inf")).view(scores.shape)

    def _run_experts(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sums of the chosen experts' outputs, [T, H] float32."""
        by_expert = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.config.num_experts).tolist()
        rows = x.index_select(0, by_expert // self.config.num_chosen)
        outputs = []
        for expert, part in zip(self.experts, rows.split(counts), strict=True):
            if len(part):
                missing = max(self.min_rows - len(part), 0)
                outputs.append(expert(F.pad(part, (0, 0, 0, missing)) if missing else part)[: len(part)])
        place = torch.empty_like(by_expert)
        place[by_expert] = torch.arange(len(by_expert))
        starts = torch.arange(0, len(place), self.config.num_chosen)
        return torch.embedding_bag(torch.cat(outputs).float(), place, starts, False, 0, False, weights.flatten())[0]

    def linears(self) -> list[PackedLinear]:
        shared = [] if self.shared is None else self.shared.linears()
        return [self.router, *self.experts[0].linears(), *shared]
