"""The small GPT with its output head tied to the token embedding."""

from __future__ import annotations

from torch import nn

from autopar.zoo import gpt
from autopar.zoo.gpt import compute_loss as compute_loss
from autopar.zoo.gpt import example_batch as example_batch


def build_model() -> nn.Module:
    model = gpt.GPT(gpt.VOCABULARY, gpt.WIDTH, gpt.HEADS, gpt.LAYERS, gpt.SEQUENCE)
    nn.init.normal_(model.tokens.weight, std=gpt.WIDTH**-0.5)
    model.head.weight = model.tokens.weight
    return model
