"""Why a model cannot be captured, where in it, and the way out."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autopar.errors import AutoparError, CaptureError
from autopar.model.origin import where

VALUES = (
    "Shapes and branches must not depend on tensor values: choose with torch.where or a mask, keep the size fixed "
    "(a capacity, torch.topk), and take .item() out of forward"
)
# by name: what torch raises where values decide, over its modules that trace
VALUE_ERRORS = {
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "Unsupported",
    "UserError",
}


@contextmanager
def explained(source: str, module: nn.Module, inputs: dict[str, torch.Tensor]) -> Iterator[None]:
    """While it holds, an error of the user's code becomes one that names its module, line and remedy.

    Args:
        source: the model's file.
        module: the root; the user's model is its child ``model``.
        inputs: what it is called with.

    Raises:
        CaptureError: the body failed.
    """
    paths = {id(child): path.removeprefix("model").removeprefix(".") for path, child in module.named_modules()}
    entered: list[str] = []

    def enter(child: nn.Module, args: object) -> None:
        entered.append(paths.get(id(child), ""))

    def leave(child: nn.Module, args: object, result: object) -> None:
        entered.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        inside = next((path for path in reversed(entered) if path), "")
        at = f" in module {inside!r}" if inside else ""
        raise CaptureError(
            f"{source} cannot be captured: {type(error).__name__}{at}: {reason}{_user_line(error, source)}",
            _remedy(error, inputs),
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def without_rule(node: fx.Node, error: Exception) -> CaptureError:
    """An exported operator cannot run on the meta device."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return CaptureError(
        f"the result of {node.target}{where(node)} cannot be told without values: "
        f"{lines[0].rstrip('.') if lines else type(error).__name__}",
        VALUES,
    )


def without_value(node: fx.Node) -> CaptureError:
    """A constant that the trace sees without its value, so that no process could run the graph."""
    reader = next(iter(node.users), None)
    return CaptureError(
        f"forward reads a tensor that is no parameter, buffer or input{where(reader) if reader else ''}",
        "Register it: self.register_buffer('name', torch.tensor([...])); so also a list used as an index",
    )


def _remedy(error: Exception, inputs: dict[str, torch.Tensor]) -> str:
    if "fake" in str(error) and ("register_fake" in str(error) or "fake impl" in str(error)):
        return "Give the operator a fake rule, which says the shape of its result: torch.library.register_fake"
    if type(error).__name__ in VALUE_ERRORS or "data-dependent" in str(error):
        return VALUES
    given = ", ".join(f"{key}: {str(v.dtype).removeprefix('torch.')} {list(v.shape)}" for key, v in inputs.items())
    return f"The model was called with what example_batch gives ({given}): it must run on that, without values"


def _user_line(error: BaseException, source: str) -> str:
    """The last line of the user's file on the way to an error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == source]
    return f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
