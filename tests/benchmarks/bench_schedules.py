"""The schedule simulator against torch.distributed.pipelining: real gloo processes whose compute is sleep.

    PYTHONPATH=. python tests/benchmarks/bench_schedules.py [--ranks 4,8]

Every schedule with equal and with unequal stages. What a hop between two stages costs is measured once, on passes of no
length, and given to the simulator as the time of a send. Takes a few minutes.
"""

from __future__ import annotations

import argparse

from autopar.cost.schedules import PRICED
from autopar.cost.timeline import play
from tests.sleeping_pipeline import hop_s, measure, sleeping_stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,8")
    worst = 0.0
    for ranks in map(int, parser.parse_args().ranks.split(",")):
        hop = hop_s(ranks)
        print(f"{ranks} processes, {hop * 1e3:.2f} ms a hop", flush=True)
        for schedule in PRICED:
            virtual, count = 1 if schedule in ("gpipe", "1f1b") else 2, 2 * ranks
            for equal in (True, False):
                stages = sleeping_stages(ranks * virtual, equal, hop)
                measured = measure(schedule, ranks, virtual, count, stages, repeats=2)
                error = play(schedule, ranks, virtual, count, stages).makespan_s / measured - 1
                worst = max(worst, abs(error))
                what = "equal" if equal else "unequal"
                print(f"  {schedule:24} {what:8} measured {measured * 1e3:7.0f} ms  error {error:+6.2%}", flush=True)
    print(f"worst error {worst:.2%}")


if __name__ == "__main__":
    main()
