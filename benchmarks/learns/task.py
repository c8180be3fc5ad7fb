"""What a task of the benchmark is: tokens with labels, and how a token becomes a vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

# Of the training samples; this share, the last of them, chooses the rate and then joins the others.
VALIDATION = 0.2


@dataclass(frozen=True)
class Task:
    """Labelled sequences of tokens, all of one length.

    Attributes:
        classes: number of classes; labels are in 0 .. classes - 1.
        inputs, test_inputs: (samples, N, ...), what ``embed`` takes.
        labels, test_labels: (samples,) int64.
        embed: the width d -> a module that makes tokens (B, N, d) of inputs (B, N, ...).
        readouts: those that make sense: "mean" over the tokens, "class" (a learned vector in front,
            of which only the state is read), "query" (the first token of the task itself).
        places: whether learned positions are added; False where the order means nothing.
        pixels: whether the inputs are image patches with values in [-1, 1].
        epochs: trained by default.

    The order of the training samples is random already, and no image of the last fifth (by which the
    rate is chosen) is in the rest.
    """

    classes: int
    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    embed: Callable[[int], nn.Module]
    readouts: tuple[str, ...]
    places: bool
    pixels: bool
    epochs: int

    @property
    def tokens(self) -> int:
        return self.inputs.shape[1]

    @property
    def validation(self) -> int:
        """Number of training samples by which the rate is chosen."""
        return max(1, round(VALIDATION * len(self.labels)))
