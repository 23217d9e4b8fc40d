"""Plots draw what the estimate says: bars, extents, labels."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from autopar.errors import InputError
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.huggingface import load_config
from autopar.model.spec import load
from autopar.report.explain import memory_parts
from autopar.report.plots.accuracy import accuracy
from autopar.report.plots.block_graph import block_graph
from autopar.report.plots.breakdown import breakdown
from autopar.report.plots.chain import chain, groups_of, passes
from autopar.report.plots.curves import scaling, sweep
from autopar.report.plots.frontier import apart, frontier, undominated
from autopar.report.plots.kinds import OF_PLAN, of_lengths
from autopar.report.plots.memory import held_over_time, memory, memory_over_time
from autopar.report.plots.style import MEMORY, TIME, save, seconds_unit
from autopar.report.plots.timeline import timeline
from autopar.report.plots.topology import topology
from autopar.report.studies import over_devices, over_lengths, part_of, visited
from autopar.report.subject import Subject
from autopar.units import GIB
from tests.cli.command import ROOT
from tests.report.subjects import pipelined, replicated

MLP = str(ROOT / "autopar/zoo/mlp.py")


def axes_of(drawn: Figure) -> Axes:
    (axes,) = drawn.axes
    return axes


def bars(drawn: Figure) -> dict[str, list[Rectangle]]:
    """Bars by label."""
    found: dict[str, list[Rectangle]] = {}
    for container in axes_of(drawn).containers:
        assert isinstance(container, BarContainer)
        found.setdefault(str(container.get_label()), []).extend(container.patches)
    return found


def texts(drawn: Figure) -> list[str]:
    return [text.get_text() for text in axes_of(drawn).texts]


def test_timeline_has_every_action_where_it_runs() -> None:
    about = pipelined()
    unit, name = seconds_unit(about.estimate.step_time_s)
    drawn = timeline(about)
    want = {"F": [], "B": []}
    for event in about.estimate.timeline.events():
        want[event.action.kind].append((event.rank, event.start_s * unit, event.end_s * unit))
    for kind, label in (("F", "forward"), ("B", "backward")):
        got = [(r.get_y() + r.get_height() / 2, r.get_x(), r.get_x() + r.get_width()) for r in bars(drawn)[label]]
        assert sorted(got) == [pytest.approx(one) for one in sorted(want[kind])]
    assert axes_of(drawn).get_xlim()[1] == pytest.approx(about.estimate.step_time_s * unit)
    assert axes_of(drawn).get_xlabel() == f"time in the step [{name}]"
    assert {"0", "1", "2", "3"} <= set(texts(drawn))


def test_memory_bars_reach_the_peak() -> None:
    about = pipelined()
    drawn = memory(about)
    tops = [0.0] * 2
    for patches in bars(drawn).values():
        for i, bar in enumerate(patches):
            tops[i] = max(tops[i], bar.get_y() + bar.get_height())
    assert tops == pytest.approx([stage.reserved / GIB for stage in about.estimate.stages])
    assert set(memory_parts(about, 0)) == set(MEMORY)
    assert any("limit 78 GiB" in text for text in texts(drawn))
    assert "GiB" in axes_of(drawn).get_ylabel()


@pytest.mark.parametrize("about", [pipelined(), replicated()], ids=lambda s: s.name)
def test_memory_over_time_peaks_at_the_allocated_peak(about: Subject) -> None:
    drawn = axes_of(memory_over_time(about))
    for rank, stage in enumerate(about.estimate.stages):
        times, held = held_over_time(about, rank)
        assert max(held) == stage.allocated
        assert held[-1] == held[0] == stage.allocated - stage.activations
        assert times == sorted(times)
        assert max(drawn.lines[rank].get_ydata()) == pytest.approx(stage.allocated / GIB)


def test_breakdown_is_as_long_as_the_step() -> None:
    pair = [pipelined(), replicated()]
    drawn = breakdown(pair)
    unit, _ = seconds_unit(max(s.estimate.step_time_s for s in pair))
    for i, about in enumerate(pair):
        ends = [patches[i].get_x() + patches[i].get_width() for patches in bars(drawn).values()]
        assert max(ends) == pytest.approx(about.estimate.step_time_s * unit)
    assert set(pipelined().estimate.breakdown) == set(TIME)
    assert [label.get_text() for label in axes_of(drawn).get_yticklabels()] == ["pipelined", "replicated"]


def test_topology_puts_axes_on_the_link_they_cross() -> None:
    drawn = topology(pipelined())
    assert {"pp = 2", "dp_shard = 2", "tp = 2"} <= set(texts(drawn))
    assert any("3,600 Gbit/s" in text for text in texts(drawn))


def test_block_graph_names_placements_and_redistributions() -> None:
    drawn = block_graph(pipelined())
    shown = texts(drawn)
    assert any(text.startswith("attn.scaled_dot_product_attention") for text in shown)
    assert any("->" in text and text.startswith("tp: ") for text in shown)
    assert not any("->" in text for text in texts(block_graph(replicated())))
    with pytest.raises(InputError, match="block kind 'nose' is unknown"):
        block_graph(replicated(), "nose")


def test_frontier_keeps_the_undominated() -> None:
    table = pd.DataFrame(
        {
            "mesh": ["a", "b", "c", "d"],
            "peak_reserved_gib": [1.0, 2.0, 3.0, 3.0],
            "tokens_per_s": [10.0, 8.0, 20.0, 19.0],
            "memory_limit_gib": [4.0] * 4,
        }
    )
    assert list(undominated(table)["mesh"]) == ["a", "c"]
    drawn = frontier(table)
    assert {"a", "c"} == set(texts(drawn))
    assert axes_of(drawn).collections[0].get_offsets().shape == (4, 2)
    assert "[GiB]" in axes_of(drawn).get_xlabel()


def test_studies_and_their_curves() -> None:
    job, cluster = load(MLP), Cluster.load("local-cpu-4")
    table = over_devices(job, cluster, [1, 2, 4], 16)
    assert sorted(zip(table["kind"], table["devices"], strict=True)) == [
        (k, n) for k in ("strong", "weak") for n in (1, 2, 4)
    ]
    last = table[table["devices"] == 4]
    assert last["tokens_per_s"].nunique() == 1  # with all devices both are the same case
    lines = {str(line.get_label()): list(line.get_ydata()) for line in axes_of(scaling(table)).lines}
    assert lines["strong scaling"] == list(table[table["kind"] == "strong"]["tokens_per_s"])
    plans = visited(job, cluster, 16)
    assert plans["step_time_s"].is_monotonic_increasing
    assert plans["step_time_s"].iloc[0] == pytest.approx(last["step_time_s"].iloc[0])
    assert len(plans) > 5
    assert axes_of(sweep(plans.iloc[:2].assign(global_batch=[8, 16]), "global_batch")).get_xlabel() == "samples a step"


def test_part_of_a_cluster() -> None:
    whole = Cluster.load("dgx-h100-64")
    assert [part_of(whole, n).devices for n in (1, 4, 8, 32, 64)] == [1, 4, 8, 32, 64]
    assert part_of(whole, 64) == whole
    assert [link.devices for link in part_of(whole, 16).links] == [8, 16]
    with pytest.raises(InputError, match="12 devices are not a part"):
        part_of(whole, 12)


def test_accuracy_draws_a_point_a_run() -> None:
    rows = pd.DataFrame(
        {"group": ["a", "a", "b"], "measured_step_time_s": [1.0, 2.0, 3.0], "predicted_step_time_s": [1.1, 2.2, None]}
    )
    drawn = axes_of(accuracy(rows))
    points = [c for c in drawn.collections if c.get_label() == "a (2)"]
    assert points[0].get_offsets().tolist() == [[1.0, 1.1], [2.0, 2.2]]
    assert "[s]" in drawn.get_xlabel()


@pytest.mark.parametrize("kind", list(OF_PLAN))
def test_files_are_whole(kind: str, tmp_path: Path) -> None:
    drawn = OF_PLAN[kind](replicated())
    save(drawn, tmp_path / "a.svg")
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    save(drawn, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "a.svg"]


def test_bad_files(tmp_path: Path) -> None:
    for name, fault in (("a.pdf", "ends in '.pdf'"), ("none/a.png", "does not exist")):
        with pytest.raises(InputError, match=fault):
            save(Figure(), tmp_path / name)


def test_chain_draws_groups_and_what_passes_between_them() -> None:
    graph = capture(load(str(ROOT / "tests/model/programs/unet.py")), 2)
    groups = groups_of(graph)
    texts = [text.get_text() for text in axes_of(chain(graph)).texts]
    assert all(any(text.startswith(group.title) for text in texts) for group in groups)
    skips = [text for start, end, text in passes(graph, groups) if end - start > 1]
    assert len(skips) == 3
    assert set(skips) <= set(texts)
    layers = capture(load(str(ROOT / "autopar/zoo/gpt.py")), 2)
    assert [len(group.blocks) for group in groups_of(layers)] == [1, 4, 1]
    assert groups_of(layers)[1].title == "blocks.0 .. blocks.3  (4 x)"


def test_lengths_are_those_of_a_config(tmp_path: Path) -> None:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 64}
    named = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(named))
    jobs = {length: load_config(str(tmp_path), length) for length in (16, 32)}
    cluster = Cluster.load("local-cpu-2")
    table = over_lengths(jobs, cluster, 128, pins={"dp": 2, "schedule": "1f1b"})
    assert list(zip(table["sequence_length"], table["global_batch"], strict=True)) == [(16, 8), (32, 4)]
    assert axes_of(sweep(table, "sequence_length")).get_xlabel() == "sequence length [tokens]"
    with pytest.raises(InputError, match="cannot change the sequence length"):
        of_lengths(load(MLP), replicated())


def test_labels_of_a_frontier_keep_apart() -> None:
    best = pd.DataFrame(
        {"mesh": list("abc"), "peak_reserved_gib": [1.0, 2.0, 3.0], "tokens_per_s": [10.0, 98.0, 100.0]}
    )
    assert [mesh for mesh, _, _ in apart(best, 90.0)] == ["c", "a"]
