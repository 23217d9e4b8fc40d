"""Models that cannot be captured: one message that names what, where and the way out, and nothing else on stderr."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import CaptureError, ModelError
from autopar.model.capture import capture
from autopar.model.spec import load

FILE = """import torch
from torch import nn
@torch.library.custom_op("refused::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.table, self.loose = nn.Linear(4, 4), nn.Embedding(8, 4), [torch.ones(4, 4)]
    def forward(self, x):
        {line}
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
    def forward(self, x):
        return self.inner(x)
def build_model():
    return M()
def example_batch(n):
    return {{"x": {batch}}}
"""
ONES = "torch.ones(n, 4)"
VALUES = "must not depend on tensor values"
CASES = {
    "branch": ("return self.linear(x).mean() if x.sum() > 0 else x.mean()", ONES, [VALUES, "line 11", "'inner'"]),
    "item": ("return self.linear(x)[: int(x.sum().item())].mean()", ONES, [VALUES, "line 11", "'inner'"]),
    "nonzero": ("y = self.linear(x); return y[y > 0].mean()", ONES, [VALUES, "model.py:11", "'inner'"]),
    "cond": (
        "return torch.cond(x.sum() > 0, lambda y: self.linear(y).mean(), lambda y: y.mean(), (x,))",
        ONES,
        [VALUES, "line 11"],
    ),
    "no fake rule": ("return twice(self.linear(x)).mean()", ONES, ["register_fake", "line 11", "'inner'"]),
    "dtype": ("return self.table(x).mean()", ONES, ["x: float32 [2, 4]", "line 11", "'inner.table'"]),
    "shape": ("return self.linear(x).mean()", "torch.ones(n, 5)", ["x: float32 [2, 5]", "line 11", "'inner.linear'"]),
    "numpy": ("return self.linear(x).mean() * float(x.numpy().mean())", ONES, ["line 11", "'inner'"]),
    "loose tensor": ("return (self.linear(x) @ self.loose[0]).mean()", ONES, ["register_buffer", "model.py:11"]),
    "index list": ("return self.linear(x)[:, [0, 2, 1, 3]].mean()", ONES, ["register_buffer", "model.py:11"]),
}


def write(folder: Path, line: str, batch: str) -> str:
    (folder / "model.py").write_text(FILE.format(line=line, batch=batch))
    return str(folder / "model.py")


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_message_names_what_where_and_the_way_out(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line, batch, expected = CASES[name]
    job = load(write(tmp_path, line, batch))
    with pytest.raises(CaptureError) as caught:
        capture(job, 2)
    assert not [part for part in expected if part not in str(caught.value)], str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("line", ["return self.linear(x).sum() > 0", "return x.mean()"])
def test_a_loss_without_gradient_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="depends on no trainable parameter"):
        capture(load(write(tmp_path, line, ONES)), 2)


def test_an_input_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gives 'x' as list"):
        load(write(tmp_path, "return self.linear(x[0]).mean()", "[torch.ones(n, 4)]"))


def test_what_forward_prints_to_stderr_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = "import sys; print('seen', file=sys.stderr); return self.linear(x).mean()"
    capture(load(write(tmp_path, line, ONES)), 2)
    assert "seen" in capfd.readouterr().err
