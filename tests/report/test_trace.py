"""The trace keeps to the format that Perfetto reads, and holds the simulated step."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import jsonschema
import pytest

from autopar.plan import Mesh
from autopar.report.subject import Subject
from autopar.report.trace import COMPUTE, save_trace, trace
from tests.cost.plans import drawn_plan
from tests.report.subjects import pipelined, priced, replicated

NUMBER, WHOLE = {"type": "number", "minimum": 0}, {"type": "integer", "minimum": 0}
SCHEMA = {  # of "Trace Event Format", sections "JSON Object Format", "Complete Events" and "Metadata Events"
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "ph", "pid", "tid"],
                "properties": {"name": {"type": "string"}, "pid": WHOLE, "tid": WHOLE, "args": {"type": "object"}},
                "oneOf": [
                    {
                        "properties": {"ph": {"const": "X"}, "ts": NUMBER, "dur": NUMBER},
                        "required": ["ts", "dur", "cat"],
                    },
                    {
                        "properties": {
                            "ph": {"const": "M"},
                            "name": {"enum": ["process_name", "thread_name", "process_sort_index"]},
                        },
                        "required": ["args"],
                    },
                ],
            },
        },
    },
}


def zero_bubble() -> Subject:
    mesh, schedule = Mesh(pp=2, dp_replicate=2), "interleaved_zero_bubble"
    return priced(drawn_plan(mesh, Random(5), schedule=schedule, virtual_stages=2), "zero bubble")


@pytest.mark.parametrize("about", [pipelined(), replicated(), zero_bubble()], ids=lambda s: s.name)
def test_format_and_times(about: Subject, tmp_path: Path) -> None:
    save_trace(about, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    jsonschema.validate(document, SCHEMA)
    drawn = [event for event in document["traceEvents"] if event["ph"] == "X"]
    for rank in range(about.plan.mesh.pp):
        mine = sorted((e for e in drawn if (e["pid"], e["tid"]) == (rank, COMPUTE)), key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(mine))
        assert mine[-1]["ts"] + mine[-1]["dur"] == pytest.approx(1e6 * about.estimate.step_time_s)
        busy = sum(e["dur"] for e in mine if e["cat"] != "step")
        assert busy == pytest.approx(1e6 * about.estimate.timeline.busy_s[rank])


def test_what_is_sent_arrives_before_it_is_used() -> None:
    events = [event for event in trace(pipelined())["traceEvents"] if event["ph"] == "X"]
    sends = [event for event in events if event["cat"] == "send"]
    assert len(sends) == 2 * pipelined().plan.micro_batches
    for send in sends:
        where = send["args"]
        forward = where["to_stage"] > where["from_stage"]
        name = f"{'forward' if forward else 'backward'} {where['micro_batch']}"
        (used,) = [e for e in events if e["name"] == name and e["args"]["stage"] == where["to_stage"]]
        assert send["ts"] + send["dur"] <= used["ts"] + 1e-6
