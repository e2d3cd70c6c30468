"""Linear layers over packed weights, and the gated MLP made of two of them.

Weights are held packed by oneDNN (opaque; faster than `F.linear` at every batch size, and a row of the result does not
depend on the number of rows, as long as there are at least `MIN_ROWS`). They are the only copy.
"""

import torch
import torch.nn.functional as F

# Below this number of rows oneDNN and MKL take other kernels, whose sums are rounded differently (measured on
# AVX-512; `invariance.py` checks it for the machine at hand).
MIN_ROWS = 2

_linear_packed = torch.ops.mkldnn._linear_pointwise.default
_pack = torch.ops.mkldnn._reorder_linear_weight


class PackedLinear:
    """A weight [out, in] and a bias [out] or None; `dense()` gives back exactly the weight that was packed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight = _pack(weight.contiguous(), None)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _linear_packed(x, self.weight, self.bias, "none", [], "")

    def dense(self) -> torch.Tensor:
        return self.weight.to_dense()


class GatedMlp:
    """down(silu(gate(x)) * up(x)), gate and up as one matrix: a dense MLP, an expert, or the shared experts."""

    def __init__(self, inner: int):
        self.inner = inner
        self.gate_up: PackedLinear | None = None
        self.down: PackedLinear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(x)
        return self.down(F.silu(gate_up[:, : self.inner]).mul_(gate_up[:, self.inner :]))

    def linears(self) -> list[PackedLinear]:
        return [self.gate_up, self.down]
