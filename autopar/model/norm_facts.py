"""In which dtype a norm keeps its statistics: the device decides.

The CPU kernels keep them in the dtype of the weights, where those are wider than the operand, else in the operand's
(``is_mixed_type`` and ``param_scalar_type`` in ``torch/native/cpu/mixed_data_type.h``); torch's meta rule shows what
other devices keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autopar.model.graph import TensorMeta

Kept = tuple[str, int] | TensorMeta
NORMS = (torch.ops.aten.layer_norm.default, torch.ops.aten.group_norm.default, torch.ops.aten.batch_norm.default)


def on_cpu(saved: Sequence[Kept], operands: Sequence[torch.Tensor]) -> tuple[Kept, ...]:
    """What a norm keeps.

    Args:
        saved: as the meta device shows; the statistics are tensors of its own.
        operands: input and, where they are given, weight, bias and running statistics.
    """
    widest = max((operand.dtype for operand in operands), key=lambda dtype: dtype.itemsize)
    return tuple(replace(one, dtype=widest) if isinstance(one, TensorMeta) else one for one in saved)
