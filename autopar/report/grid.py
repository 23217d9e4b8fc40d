"""Grid: the layouts that people lay out by hand, every one of them estimated; quick also on thousands of devices.

A search chooses the placement of every operator, which takes minutes on large clusters. A grid only varies the numbers
that launch scripts name (tensor-, pipeline- and context-parallel sizes, ZeRO stage, micro-batch, recomputation), with
blocks laid out as Megatron-LM does, and prices them by the same engine. It proves nothing about what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd

from autopar.errors import AutoparError
from autopar.units import GIB
from autopar.validate.predict import Predictor, cluster_of, mesh_of
from autopar.validate.rows import Row


def grid(predictor: Predictor, settings: Mapping[str, Any], over: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Every combination of some settings of a training run that can be laid out, fastest first.

    Args:
        predictor: keeps captured models and priced blocks; share one between grids of one model.
        settings: model, cluster and batch under the column names of ``profiles/measured/training_runs.csv``; a micro-
            batch or recomputation left open is the fastest that fits.
        over: values to try, by column: ``{"tp": (1, 2, 4, 8), "zero_stage": (1, 3)}``.

    Returns:
        A row a combination: the columns of ``over``, ``dp``, ``mesh`` in words, ``step_time_s``, ``tokens_per_s`` of
        all devices, ``peak_reserved_gib`` of the fullest device, ``memory_limit_gib``, ``fits``, and the seconds of
        ``compute_s``, ``bubble_s`` and each communication (``tp_s``, ...). Combinations that cannot be laid out are
        left out.

    Raises:
        InputError: no combination can be laid out; says why the last one cannot.
    """
    rows, why = [], None
    for values in product(*over.values()):
        chosen = dict(zip(over, values, strict=True))
        try:
            rows.append({**chosen, **_numbers(predictor, Row(**{"id": "grid", **settings, **chosen}))})
        except AutoparError as error:
            why = error
    if not rows and why is not None:
        raise why
    return pd.DataFrame(rows).sort_values("step_time_s", ignore_index=True)


def _numbers(predictor: Predictor, row: Row) -> dict[str, Any]:
    found, mesh, limit = predictor.predict(row), mesh_of(row), cluster_of(row).memory_limit_bytes
    return {
        "dp": mesh.dp,
        "mesh": mesh.describe(),
        "step_time_s": found.step_time_s,
        "tokens_per_s": row.global_batch * row.seq_len / found.step_time_s,
        "peak_reserved_gib": found.peak_reserved / GIB,
        "memory_limit_gib": limit / GIB,
        "fits": found.peak_reserved <= limit,
        **{f"{part}_s": seconds for part, seconds in found.estimate.breakdown.items()},
    }
