"""Text from a language model, symbol by symbol."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from solvers.core.checks import require_count, require_nonnegative


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    most: int | None = None,
    generator: torch.Generator | None = None,
    iterations: int | None = None,
) -> Tensor:
    """Continue each row of ``prompt`` by ``count`` symbols, ``P(c) = softmax(logits / temperature)``.

    The model sees the last ``model.length`` symbols. It is used in evaluation mode and left as it was.

    Args:
        model: with ``length`` and ``forward(symbols (B, N)) -> logits (B, N, V)``.
        prompt: (B, N) integers, N >= 1.
        count: symbols to add.
        temperature: >= 0; 0 takes the likeliest symbol.
        most: draw among the so many likeliest symbols only; None: among all.
        generator: of the draws, a CPU generator; None: torch's own.
        iterations: of a model that takes them.

    Returns:
        (B, N + count), the prompt first.

    Raises:
        TypeError, ValueError: for arguments other than the above.
    """
    require_count("count", count, low=0)
    require_nonnegative("temperature", temperature)
    if most is not None:
        require_count("most", most)
    if prompt.dim() != 2 or prompt.is_floating_point() or not prompt.shape[1]:
        raise ValueError(
            f"prompt must be integers (B, N), N >= 1, got {prompt.dtype} {tuple(prompt.shape)}"
        )
    modes = [(part, part.training) for part in model.modules()]
    symbols, length = prompt, int(model.length)  # type: ignore[arg-type]
    options = {} if iterations is None else {"iterations": iterations}
    model.eval()
    try:
        for _ in range(count):
            logits = model(symbols[:, -length:], **options)[:, -1].float().cpu()
            drawn = _draw(logits, temperature, most, generator)
            symbols = torch.cat((symbols, drawn.to(symbols)), 1)
    finally:
        for part, training in modes:
            part.training = training
    return symbols


def _draw(
    logits: Tensor, temperature: float, most: int | None, generator: torch.Generator | None
) -> Tensor:
    """One symbol of each row of ``logits`` (B, V), (B, 1)."""
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    if most is not None and most < logits.shape[1]:
        kept = logits.topk(most, -1).indices
        logits = torch.full_like(logits, -torch.inf).scatter(1, kept, logits.gather(1, kept))
    # The likeliest is at 0, so that small temperatures send the others to -inf and not it to inf.
    apart = (logits - logits.amax(-1, keepdim=True)).double() / temperature
    return torch.multinomial(apart.softmax(-1), 1, generator=generator)
