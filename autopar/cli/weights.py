"""``autopar weights``: the weights of a checkpoint for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def weights(
    checkpoint: Annotated[Path, typer.Argument(help="Folder step-NNNNNNNN that 'autopar run' wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .safetensors file to write.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write the weights of a checkpoint as safetensors, under the names of the model's own state_dict.

    'autopar run --weights FILE' begins from such a file.

    Example: autopar weights checkpoints/step-00000100 -o model.safetensors
    """
    import json

    from autopar.runtime.weights import export_safetensors

    count = export_safetensors(checkpoint, output)
    if json_output:
        typer.echo(json.dumps({"file": str(output), "tensors": count}))
    else:
        typer.echo(f"{count} tensors in {output}")
