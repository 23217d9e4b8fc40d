"""What ``embedding_bag`` gives beside its result: the device decides.

The CPU kernel sums bags row by row and makes no map from indices to bags (``torch/native/EmbeddingBag.cpp``, the fast
path, taken without per-sample weights); torch's meta rule shows what other devices make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.model.operator_facts import Strided

SUM, MAX = 0, 2


def on_cpu(args: Sequence[Any], outputs: Sequence[Strided]) -> tuple[Strided, ...]:
    """The layouts of the four results on CPU.

    Args:
        args: weight, indices, offsets, scale by frequency, mode, sparse, per-sample weights, ...
        outputs: on the meta device: result, map from indices to bags, bag sizes, maximal indices.
    """
    out, bag_of, sizes, largest = outputs
    mode = args[4] if len(args) > 4 else SUM
    weighted = len(args) > 6 and args[6] is not None
    if mode == SUM and not weighted:
        bag_of = replace(bag_of, shape=(0,), stride=(1,))
    if mode != MAX:
        largest = replace(largest, shape=sizes.shape, stride=sizes.stride)
    return out, bag_of, sizes, largest
