"""How many rows a matrix product needs so that a row's result does not depend on the number of rows.

The kernels behind a product are chosen by its size, and different kernels round differently. From some number of rows
on they agree bit by bit (measured: 2 for packed linears, 4 for MKL's batched products in float32, 1 in bfloat16 on
AVX-512); where the result of a request must not depend on its company, this is checked on the machine at hand.
"""

import logging
from collections.abc import Callable

import torch

from colloid.engines.embedded.attention import QUERY_ROWS
from colloid.engines.embedded.linear import MIN_ROWS
from colloid.engines.embedded.model import Model

logger = logging.getLogger(__name__)
TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 31, 32, 48, 64)
CANDIDATES = (1, 2, 4, 8, 16)
PAGE_PROBES = (32, 64)


@torch.inference_mode()
def required_rows(model: Model) -> dict[str, int]:
    """{"min_rows", "min_query_rows"} for this model on this machine; at least the values that are the default."""
    generator = torch.Generator().manual_seed(0)
    kinds = {type(layer.mlp): layer for layer in model.layers}
    min_rows = MIN_ROWS
    for linear in [*(linear for layer in kinds.values() for linear in layer.linears()), model.head]:
        x = torch.randn(max(TRIED), linear.weight.shape[1], generator=generator).to(linear.weight.dtype)
        min_rows = max(min_rows, smallest_invariant(lambda n, x=x, linear=linear: linear(x[:n].contiguous())))
    min_query_rows = QUERY_ROWS[model.dtype]
    for size in PAGE_PROBES:
        for inner, outer in ((model.config.key_dim, size), (size, model.config.value_dim)):
            rows = torch.randn(4, max(TRIED), inner, generator=generator).to(model.dtype)
            matrix = torch.randn(4, inner, outer, generator=generator).to(model.dtype)
            product = smallest_invariant(lambda n, a=rows, b=matrix: torch.bmm(a[:, :n].contiguous(), b), dim=1)
            min_query_rows = max(min_query_rows, product)
    logger.info("deterministic: at least %d rows a linear, %d query rows a page", min_rows, min_query_rows)
    return {"min_rows": min_rows, "min_query_rows": min_query_rows}


def smallest_invariant(product: Callable[[int], torch.Tensor], dim: int = 0) -> int:
    """The smallest number of rows from which on product(n) gives the same rows, whatever n."""
    results = {n: product(n) for n in TRIED}
    whole = results[max(TRIED)]
    differing = [n for n in TRIED if not torch.equal(results[n], whole.narrow(dim, 0, n))]
    found = next((n for n in CANDIDATES if n > max(differing, default=0)), None)
    if found is None:
        logger.warning(
            "this machine's kernels round differently at %d rows: results depend on the batch", differing[-1]
        )
        return CANDIDATES[-1]
    return found
