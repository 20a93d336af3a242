"""Weights of fewer bits: modules that take the place of the model's own, which knows nothing of them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from checkpoint import empty_weight
from engine_cpu import TiledLinear


class Int8Linear(TiledLinear):
    """A projection whose weight (out, in) is int8, times scale (out), one for each output channel."""

    def __init__(self, n_in: int, n_out: int, bias: bool = True):
        super().__init__(n_in, n_out, bias)
        self.weight = nn.Parameter(torch.empty(n_out, n_in, dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.empty(n_out))

    @classmethod
    def of(cls, linear: engine.Linear) -> "Int8Linear":
        """A projection, rounded: symmetric, an error of at most 1/254 of a channel's largest weight."""
        n_out, n_in = linear.weight.shape
        with torch.device("meta"):
            made = cls(n_in, n_out, bias=linear.bias is not None)
        exact = linear.weight.detach().float()
        made.scale = exact.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        rounded = empty_weight(exact.shape, torch.int8, exact.device).copy_((exact / made.scale[:, None]).round())
        made.weight = nn.Parameter(rounded, requires_grad=False)
        made.bias = linear.bias
        return made

    def scales(self) -> Tensor:
        """One for each output channel: (out) float32."""
        return self.scale.float()

    def float_weight(self) -> Tensor:
        """The weight that the rounded one stands for (out, in), float32."""
        return self.weight * self.scale[:, None]


class Int8Embedding(nn.Module):
    """The embedding that is tied to a head of int8: ids (...) -> (..., C) float32."""

    def __init__(self, head: Int8Linear):
        super().__init__()
        self.weight = head.weight
        self.register_buffer("scale", head.scale)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (...) -> (..., C)."""
        return F.embedding(ids, self.weight) * self.scale[ids][..., None]


def quantize(model: engine.GPT2) -> None:
    """All projections of a model to int8, in place, the head and the embedding tied to it included. A model that is
    int8 already stays as it is."""
    if isinstance(model.lm_head, Int8Linear):
        return
    tied = model.lm_head.weight is model.wte.weight
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, engine.Linear):
                setattr(parent, name, Int8Linear.of(child))
    if tied:
        model.wte = Int8Embedding(model.lm_head)
    model.swaps = (*model.swaps, quantize)
    model.backend.pack(model)
