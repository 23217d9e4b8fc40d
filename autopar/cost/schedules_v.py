"""V-shaped pipeline schedules: each rank holds one stage on the way down the chain and one on the way back up.

Sources: ZB-V (Qi et al. 2023, arXiv 2401.10241, section 6); DualPipeV (DeepSeek-AI 2024, arXiv 2412.19437, section
3.2.1, and github.com/deepseek-ai/DualPipe). Orders are those of torch.distributed.pipelining; an overlapped forward
and backward of DualPipeV runs as it does there by default, one after the other.
"""

from __future__ import annotations

from collections import deque

from autopar.cost.schedules import Action


class _Order:
    """Actions of one rank, with the next micro-batch of each kind of pass."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stages = (rank, 2 * ranks - 1 - rank)
        self.actions: list[Action] = []
        self.counts: dict[tuple[str, int], int] = {}
        self.pending: deque[Action] = deque()

    def count(self, kind: str, half: int) -> int:
        return self.counts.get((kind, half), 0)

    def add(self, kind: str, half: int) -> None:
        """The next micro-batch of that kind on the stage of that half (0 down, 1 up)."""
        counter = "I" if kind == "B" else kind
        index = self.count(counter, half)
        self.counts[counter, half] = index + 1
        self.actions.append(Action(kind, self.stages[half], index))
        if kind == "I":
            self.pending.append(Action("W", self.stages[half], index))

    def weights(self) -> None:
        """Gradients of weights of the oldest backward that lacks them, if there is one."""
        if self.pending:
            self.actions.append(self.pending.popleft())


def zbv(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    """ZB-V. With few micro-batches, the order of the least number that fills the pipeline, less what is not there."""
    order, full = _Order(rank, ranks), max(2 * ranks - 1, micro_batches)
    for _ in range(2 * (ranks - rank) - 1):
        order.add("F", 0)
    for _ in range(rank):
        order.add("F", 1)
        order.add("F", 0)
    for _ in range(ranks - rank):
        for kind in ("F", "I", "W"):
            order.add(kind, 1)
    while order.count("F", 1) < order.count("F", 0) or order.count("F", 0) < full:
        if order.count("F", 0) < full:
            order.add("F", 0)
        for kind, half in (("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)):
            order.add(kind, half)
    for _ in range(rank):
        order.add("I", 0)
        order.add("I", 1)
    for _ in range(ranks - rank):
        order.add("I", 0)
        order.add("W", 0)
    for half in (1, 0):
        while order.count("W", half) < order.count("I", half):
            order.add("W", half)
    return tuple(action for action in order.actions if action.micro_batch < micro_batches)


def dual_pipe_v(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    """DualPipeV in the eight steps of its published code."""
    order, after = _Order(rank, ranks), ranks - rank - 1
    for _ in range(2 * after):
        order.add("F", 0)
    for _ in range(rank + 1):
        order.add("F", 0)
        order.add("F", 1)
    for _ in range(after):
        order.add("I", 1)
        order.weights()
        order.add("F", 1)
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        for forward, backward in ((0, 1), (1, 0)):
            order.add("F", forward)
            order.add("B", backward)
    for _ in range(after):
        order.add("B", 1)
        order.add("F", 1)
        order.add("B", 0)
    _drain(order, rank, after)
    return tuple(order.actions)


def _drain(order: _Order, rank: int, after: int) -> None:
    """The last backwards; from the middle on gradients of weights wait for the bubbles."""
    split = False
    for i in range(rank + 1):
        middle = i == (rank + 1) // 2
        split = split or (middle and rank % 2 == 1)
        order.add("I" if split else "B", 1)
        split = split or (middle and rank % 2 == 0)
        order.add("I" if split else "B", 0)
    for _ in range(after):
        order.weights()
        order.add("I" if split else "B", 0)
    for _ in range(rank + 1):
        order.weights()
