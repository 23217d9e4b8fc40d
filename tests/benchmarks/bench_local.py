"""Predicted against measured on this machine: many plans of the zoo's models with 2 real processes.

    PYTHONPATH=. python tests/benchmarks/bench_local.py [--models gpt,mlp] [--networks loopback,1gbit] [--minutes 5]

Measures this machine for each model (a profile as ``autopar profile`` writes it) and the collectives of each network,
makes a plan for every combination of pins below, trains it in 2 gloo processes, and compares the median step time with
the prediction. Where root allows, the processes are also put into two network namespaces joined at 1 Gbit/s and at
200 Mbit/s. Everything finished is kept in the output folder and not measured again, so that the run can be cut short
(``--minutes``) and taken up. Writes ``predictions.csv``, ``predictions.png`` and ``summary.md``.

The machine should be idle. What other programs took of its processors is measured beside each step time; a burst of
steps with more than 3% is repeated a few times, the least disturbed one counts, and the table shows its share.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cost.estimate import estimate
from autopar.errors import AutoparError
from autopar.hardware import Cluster, Profile
from autopar.hardware.profiles import MeasuredCollective
from autopar.model.capture import capture
from autopar.model.spec import TrainingJob, load
from autopar.plan import Plan, write_text
from autopar.planner.planner import search
from autopar.profiler import profile_model
from tests.benchmarks.local_report import Row, write_report
from tests.benchmarks.local_worker import Measured, collectives, train
from tests.network_namespaces import available, two_hosts
from tests.processes import Group, spawn

ZOO = Path(__file__).parents[2] / "autopar" / "zoo"
CLUSTER = "local-cpu-2"
GLOBAL_BATCH = {"gpt": 16, "moe": 16, "vit": 16, "mlp": 4096}
NETWORKS = {"loopback": None, "1gbit": 1000, "200mbit": 200}  # megabit/s

Pins = dict[str, Any]  # of a search; "count" is the number of micro-batches
PINS: list[Pins] = [
    *({"dp_replicate": 2, "count": n, "recompute": r} for n in (1, 2, 4) for r in ("none", "full")),
    *({"dp_shard": 2, "count": n} for n in (1, 2, 4)),
    {"dp_shard": 2, "count": 2, "recompute": "full"},
    *({"tp": 2, "count": n} for n in (1, 4)),
    {"tp": 2, "count": 2, "recompute": "full"},
    *({"pp": 2, "schedule": s, "count": n} for s in ("1f1b", "gpipe") for n in (4, 8)),
    {"pp": 2, "schedule": "1f1b", "count": 4, "recompute": "full"},
]
# A slow network changes what is sent, not what is computed: one plan of each kind, and those that send another number
# of messages.
SLOW_PINS: list[Pins] = [
    {"dp_replicate": 2, "count": 1, "recompute": "none"},
    *({"dp_shard": 2, "count": n} for n in (1, 2)),
    {"tp": 2, "count": 1},
    *({"pp": 2, "schedule": s, "count": 4} for s in ("1f1b", "gpipe")),
]


def describe(pins: Pins) -> str:
    """Pins as text: ``tp=2 count=4``."""
    return " ".join(f"{key}={value}" for key, value in pins.items())


@dataclass(frozen=True)
class Bench:
    """One model in the output folder.

    Attributes:
        folder: keeps the profile, plans, collectives and finished measurements.
        until: clock time after which nothing new is started.
    """

    name: str
    folder: Path
    until: float

    @property
    def source(self) -> str:
        return str(ZOO / f"{self.name}.py")

    @property
    def job(self) -> TrainingJob:
        return load(self.source)

    def profile(self) -> Profile:
        """This machine as measured for the model, over loopback."""
        counts = {(pins["count"], pins.get("tp", 1) * pins.get("pp", 1)) for pins in PINS}
        sizes = sorted({GLOBAL_BATCH[self.name] * intra // 2 // count for count, intra in counts})
        graphs = [capture(self.job, size) for size in sizes]
        path = self.folder / f"{self.name}-profile.json"
        return profile_model(graphs, Cluster.load(CLUSTER), path=path, budget_s=60, model=self.source)

    def plan(self, pins: Pins, cluster: Cluster) -> Path | None:
        """The best plan with these pins, made once; None where there is none."""
        path = self.folder / f"{self.name}-{describe(pins).replace(' ', ',')}.json"
        if not path.exists():
            shards = pins.get("dp_replicate", 1) * pins.get("dp_shard", 1)
            fixed = {key: value for key, value in pins.items() if key != "count"}
            fixed["micro_batch"] = GLOBAL_BATCH[self.name] // shards // pins["count"]
            try:
                search(self.job, cluster, GLOBAL_BATCH[self.name], pins=fixed, top=1).plans[0].save(path)
            except AutoparError as error:
                print(f"{self.name}: no plan for {describe(pins)}: {error}", flush=True)
                return None
        return path

    def measured(self, network: str) -> Path:
        """One JSON object a line: what has been measured."""
        return self.folder / f"{self.name}-{network}.jsonl"

    def train(self, network: str, hosts: tuple[str, ...], cluster: Cluster) -> None:
        """Measures the plans that have not been."""
        done = {one.plan for one in read(self.measured(network))}
        wanted = {describe(pins): self.plan(pins, cluster) for pins in pins_of(network)}
        todo = {name: str(path) for name, path in wanted.items() if path and name not in done}
        if not todo or time.time() > self.until:
            return
        print(f"{self.name}, {network}: training {len(todo)} plans", flush=True)
        with Group(2, hosts=hosts) as group, self.measured(network).open("a") as file:
            for name, path in todo.items():
                if time.time() > self.until:
                    return
                file.write(json.dumps(asdict(group.run(train, self.source, path, name)[0])) + "\n")
                file.flush()

    def rows(self, network: str, cluster: Cluster) -> Iterator[Row]:
        """Measurements beside predictions."""
        for one in read(self.measured(network)):
            path = self.folder / f"{self.name}-{one.plan.replace(' ', ',')}.json"
            yield Row(self.name, network, one, estimate(self.job, Plan.load(path), cluster).step_time_s)


def pins_of(network: str) -> list[Pins]:
    return PINS if network == "loopback" else SLOW_PINS


def read(path: Path) -> list[Measured]:
    """What is kept in a file of measurements; none if it is missing."""
    return [Measured(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def hosts_of(network: str) -> Iterator[tuple[str, ...]]:
    """Namespaces for the processes; none over loopback."""
    rate = NETWORKS[network]
    if rate is None:
        yield ()
        return
    with two_hosts(rate) as names:
        yield names


def measured_collectives(network: str, hosts: tuple[str, ...], folder: Path) -> tuple[MeasuredCollective, ...]:
    """Times of collectives between the two processes in a network, measured once."""
    path = folder / f"collectives-{network}.json"
    if not path.exists():
        print(f"{network}: measuring collectives", flush=True)
        found = spawn(2, collectives, Cluster.load(CLUSTER).links[0].scope, hosts=hosts)[0]
        write_text(path, json.dumps([asdict(one) for one in found]))
    return tuple(MeasuredCollective(**one) for one in json.loads(path.read_text()))


def networks_here(asked: Sequence[str]) -> list[str]:
    """Those networks that this machine can be made to have."""
    why = available() if set(asked) - {"loopback"} else ""
    if why:
        print(f"no network namespaces: {why}")
    return [name for name in asked if name == "loopback" or not why]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(GLOBAL_BATCH))
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--minutes", type=float, default=60.0, help="start nothing new after so long")
    parser.add_argument("--output", type=Path, default=Path("bench-local"))
    options = parser.parse_args()
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    until = time.time() + 60 * options.minutes
    benches = [Bench(name, folder, until) for name in options.models.split(",")]
    profiles = {bench.name: bench.profile() for bench in benches}
    rows: list[Row] = []
    for network in networks_here(options.networks.split(",")):
        with hosts_of(network) as hosts:
            table = measured_collectives(network, hosts, folder)
            for bench in benches:
                profile = replace(profiles[bench.name], collectives=table)
                cluster = Cluster.load(CLUSTER).with_profile(profile)
                bench.train(network, hosts, cluster)
                rows.extend(bench.rows(network, cluster))
    print(write_report(rows, folder, next(iter(profiles.values()))))


if __name__ == "__main__":
    main()
