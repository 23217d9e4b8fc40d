"""Where an exported operator comes from: module path and source line."""

from __future__ import annotations

from torch import fx


def module_path(node: fx.Node) -> str:
    """The path of the nn.Module that called it (``blocks.0.attn.q``), "" at the top."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).removeprefix("model").removeprefix(".")


def source_line(node: fx.Node) -> str:
    """``file:line`` of the innermost line outside torch."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [line for line in lines if line.startswith("File ") and "/torch/" not in line]
    if not frames:
        return ""
    file, line = frames[-1].split('"')[1], frames[-1].split("line ")[1].split(",")[0]
    return f"{file}:{line}"


def where(node: fx.Node) -> str:
    """`` in module a.b, at file:line``, for messages; as much of it as is known."""
    module, line = module_path(node), source_line(node)
    return (f" in module {module!r}" if module else "") + (f", at {line}" if line else "")
