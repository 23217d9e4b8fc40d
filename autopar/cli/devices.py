"""``autopar devices``: the devices that are known."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """List the devices that clusters can be made of. A JSON file in ./profiles/devices adds one.

    Example: autopar devices --json
    """
    from autopar.hardware import Device
    from autopar.hardware.locations import available
    from autopar.units import GIB

    rows: list[dict[str, Any]] = []
    for name, path in available("devices").items():
        device = Device.load(path)
        rows.append(
            {
                "name": name,
                "description": device.description,
                "kind": device.kind,
                "memory_gib": device.memory_bytes / GIB,
                "memory_bandwidth_gb_s": device.memory_bandwidth / 1e9,
                "peak_tflops": {precision: rate / 1e12 for precision, rate in device.peak_flops.items()},
                "sources": list(device.sources),
                "file": str(path),
            }
        )
    if as_json:
        typer.echo(json.dumps({"devices": rows}, indent=2))
        return
    _print(rows)


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in ("device", "memory", "bandwidth", "bf16 peak", "what"):
        whole = max(len(row["name"]) for row in rows) if column == "device" and rows else None
        justify: Literal["left", "right"] = "left" if column in ("device", "what") else "right"
        table.add_column(column, justify=justify, overflow="fold", min_width=whole)
    for row in rows:
        peak = row["peak_tflops"].get("bf16") or row["peak_tflops"].get("fp16") or max(row["peak_tflops"].values())
        table.add_row(
            row["name"],
            f"{row['memory_gib']:g} GiB",
            f"{row['memory_bandwidth_gb_s']:g} GB/s",
            f"{peak:g} TFLOP/s",
            row["description"],
        )
    Console().print(table)
