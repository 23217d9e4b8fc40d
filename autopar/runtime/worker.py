"""One process of a run: joins the process group, trains, and leaves its summary or its error in a file.

Started by :mod:`autopar.runtime.launch` as ``python -m autopar.runtime.worker ORDER.json``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.model.spec import describe, load
from autopar.plan import Plan
from autopar.runtime.parallelize import parallelize
from autopar.runtime.processes import join, leave
from autopar.runtime.trainer import Options, train


def work(plan: Plan, source: str, options: Options, timeout_s: float, init_method: str | None = None) -> dict[str, Any]:
    """Trains in this process; rank and world size come from the environment, as torchrun sets them.

    Args:
        init_method: where the processes of a local run meet, or None for torchrun's own store.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    join(timeout_s, init_method)
    try:
        return train(parallelize(load(source), plan), options)
    finally:
        leave()


def _die_with(parent: int) -> None:
    """Ends this process when the one that started it is gone, so that no orphan is left."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Reads the order, trains, writes ``result-RANK.json`` beside it."""
    faulthandler.enable()
    order_path = Path(sys.argv[1])
    order = json.loads(order_path.read_text())
    _die_with(order["parent"])
    torch.set_num_threads(order["threads"])
    result: dict[str, Any]
    try:
        plan = Plan.load(order["plan"])
        summary = work(
            plan, order["source"], Options.from_json(order["options"]), order["timeout_s"], order["init_method"]
        )
        result, code = {"summary": summary}, 0
    except AutoparError as error:
        result, code = {"what": error.what, "remedy": error.remedy, "exit_code": error.exit_code}, error.exit_code
    except Exception as error:
        what = describe(error, Path(order["source"]))
        result, code = {"what": what, "remedy": "", "exit_code": 1, "trace": traceback.format_exc()}, 1
    target = order_path.parent / f"result-{os.environ['RANK']}.json"
    part = target.with_suffix(".part")
    part.write_text(json.dumps(result))
    os.replace(part, target)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process group whose peer is gone may never be torn down in an orderly way


if __name__ == "__main__":
    main()
