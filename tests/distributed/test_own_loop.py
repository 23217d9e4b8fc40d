"""A training loop of one's own around ``autopar.parallelize``, under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.model.capture import capture
from autopar.model.spec import load
from tests.distributed.plans import make_plan
from tests.distributed.reference import single_process

TIED = Path(__file__).with_name("tied_gpt.py")
SCRIPT = f"""
import json
from pathlib import Path

import torch
import autopar
from autopar.runtime import checkpoint, checkpoint_writer

job = autopar.load({str(TIED)!r})
model = autopar.parallelize(job, autopar.Plan.load("plan.json"))
schedule = torch.optim.lr_scheduler.LambdaLR(model.optimizer, lambda step: 1.0)
batch = job.example_batch(model.plan.global_batch)
losses = []
for step in range(3):
    losses.append(model.step(batch).item())
    schedule.step()
checkpoint_writer.save(model, Path("checkpoints"), step=3)

again = autopar.parallelize(job, model.plan)
again.load_state_dict(model.state_dict())
same = again.step(batch).item()
assert checkpoint.load(model, checkpoint.checkpoints(Path("checkpoints"))[-1]) == 3
losses.append(model.step(batch).item())
names = sorted(name for name, _ in model.named_parameters())
Path(f"rank-{{torch.distributed.get_rank()}}.json").write_text(json.dumps([losses, same, names]))
"""


def test_thirty_lines_under_torchrun(tmp_path: Path) -> None:
    job = load(str(TIED))
    make_plan(capture(job, 2), {"dp_shard": 2}, 2, 2).save(tmp_path / "plan.json")
    (tmp_path / "loop.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    want = single_process(job, [job.example_batch(8)] * 4)
    for rank in range(2):
        losses, same, names = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert losses == pytest.approx(want.losses, rel=1e-5)
        assert same == losses[3]
        assert set(names) <= set(want.parameters)
        assert len(names) == len(want.parameters) - 2  # without the buffer and the second name of the tied weight
