"""Shell scripts that start a trainer with flags."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from autopar.export.exported import Machines, comment

Flag = tuple[str, ...]  # the flag and its values

TORCHRUN = """\
LAUNCH=(torchrun --nnodes {nodes} --nproc-per-node {per_node}
  --rdzv-backend c10d --rdzv-endpoint "${{MASTER_ADDR:-localhost}}:${{MASTER_PORT:-29500}}")
"""


def launch_script(
    title: str, left_out: list[str], machines: Machines, flags: Sequence[Flag], start: str, setup: str = ""
) -> str:
    """A bash script: the flags in ``ARGS``, the launcher in ``LAUNCH``, then what starts the trainer.

    Args:
        start: the words after the launcher; further arguments of the script follow them.
        setup: lines before it, such as variables that the user must give.
    """
    lines = "".join(f"  {shlex.join(flag)}\n" for flag in flags)
    return (
        "#!/usr/bin/env bash\n"
        + comment(title, left_out)
        + "set -euo pipefail\n"
        + setup
        + f"ARGS=(\n{lines})\n"
        + TORCHRUN.format(nodes=machines.nodes, per_node=machines.per_node)
        + f'exec "${{LAUNCH[@]}}" {start} "${{ARGS[@]}}" "$@"\n'
    )
