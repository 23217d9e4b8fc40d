"""SLURM: a batch script that starts ``autopar run`` on every node with torchrun."""

from __future__ import annotations

from autopar.export.exported import Exported, Machines
from autopar.plan import Plan

SCRIPT = """\
#!/usr/bin/env bash
#SBATCH --job-name=autopar
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
# Trains with a plan of autopar: sbatch FILE [arguments of autopar run]. PLAN and PYTHON may be set before.
# SLURM sends SIGTERM two minutes before the time limit: the step is finished and a checkpoint written.
set -euo pipefail
PLAN=${{PLAN:-plan.json}}
PYTHON=${{PYTHON:-python}}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
trap 'kill -TERM $STEP' TERM
srun --kill-on-bad-exit=1 "$PYTHON" -m torch.distributed.run --nnodes {nodes} --nproc-per-node {per_node} \\
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${{MASTER_PORT:-29500}}" \\
  -m autopar.cli run "$PLAN" "$@" &
STEP=$!
wait "$STEP" || wait "$STEP"  # a signal ends the first wait
"""


def export(plan: Plan, machines: Machines) -> Exported:
    """A batch script for the plan's devices."""
    gpus = "" if machines.kind == "cpu" else f"#SBATCH --gpus-per-node={machines.per_node}\n"
    text = SCRIPT.format(nodes=machines.nodes, per_node=machines.per_node, gpus=gpus)
    left = ("partition, account and time limit: give them to sbatch",)
    return Exported("slurm", text, "PLAN=plan.json sbatch FILE --steps 1000 --checkpoint-dir checkpoints", left)
