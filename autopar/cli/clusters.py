"""``autopar clusters``: the clusters that are known."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def clusters(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """List the clusters that plans can be made for. A TOML file in ./profiles/clusters adds one.

    Example: autopar clusters --json
    """
    from autopar.hardware import Cluster
    from autopar.hardware.locations import available
    from autopar.units import GBPS, GIB

    rows: list[dict[str, Any]] = []
    for name, path in available("clusters").items():
        cluster = Cluster.load(path)
        rows.append(
            {
                "name": name,
                "description": cluster.description,
                "devices": cluster.devices,
                "nodes": cluster.nodes,
                "groups": [
                    {"device": g.device.name, "nodes": g.nodes, "devices_per_node": g.devices_per_node}
                    for g in cluster.groups
                ],
                "memory_limit_gib": cluster.memory_limit_bytes / GIB,
                "links": [
                    {
                        "scope": link.scope,
                        "devices": link.devices,
                        "bandwidth_gbps": link.bandwidth / GBPS,
                        "latency_us": link.latency_s * 1e6,
                        "oversubscription": link.oversubscription,
                    }
                    for link in cluster.links
                ],
                "file": str(path),
            }
        )
    if as_json:
        typer.echo(json.dumps({"clusters": rows}, indent=2))
        return
    _print(rows)


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in ("cluster", "devices", "of", "links (Gbit/s a device)", "what"):
        whole = max(len(row["name"]) for row in rows) if column == "cluster" and rows else None
        table.add_column(column, justify="right" if column == "devices" else "left", overflow="fold", min_width=whole)
    for row in rows:
        links = ", ".join(f"{link['scope']} {link['bandwidth_gbps']:g}" for link in row["links"])
        of = " + ".join(g["device"] for g in row["groups"])
        table.add_row(row["name"], str(row["devices"]), of, links, row["description"])
    Console().print(table)
