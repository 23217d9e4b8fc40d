"""Small models, written as a user would, for searches that can also be enumerated."""

from __future__ import annotations

from pathlib import Path

from autopar.model.spec import TrainingJob, load

TWO_LINEARS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear({width}, {hidden}, bias={bias})
        self.down = nn.Linear({hidden}, {width}, bias={bias})
    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()
def build_model():
    return Net()
def example_batch(batch_size):
    return {{"x": torch.ones(batch_size, {width})}}
def compute_loss(output, batch):
    return output
"""

RESIDUAL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear({width}, {width}, bias=False)
    def forward(self, x):
        y = self.a(x)
        return (y + torch.tanh(y)).mean()
def build_model():
    return Net()
def example_batch(batch_size):
    return {{"x": torch.ones(batch_size, {width})}}
def compute_loss(output, batch):
    return output
"""

TIED = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding({width}, 16)
    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.table(x)), self.table.weight).mean()
def build_model():
    return Net()
def example_batch(batch_size):
    return {{"x": torch.zeros(batch_size, 8, dtype=torch.long)}}
def compute_loss(output, batch):
    return output
"""


def job_of(text: str, folder: Path, **sizes: object) -> TrainingJob:
    """The job of a model text, filled in with sizes."""
    path = folder / "model.py"
    path.write_text(text.format(**sizes))
    return load(str(path))


CHAIN = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = nn.Linear({width}, {hidden}, bias={bias}), nn.Linear({hidden}, {width}, bias={bias})
        self.layers = nn.ModuleList([up, down])
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x) if i else {activation}(layer(x))
        return x.mean()
def build_model():
    return Net()
def example_batch(batch_size):
    return {{"x": torch.ones(batch_size, {width})}}
def compute_loss(output, batch):
    return output
"""
