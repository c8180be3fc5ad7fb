"""Backbones, maps of tokens to tokens: repeated layers and stacks of equilibrium layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.block import EquilibriumBlock
from implicit_attn.deq import DEQ
from implicit_attn.energies import ReLUFeedForward, SoftmaxAttention
from implicit_attn.energies.feedforward import HyperSETEnergy
from implicit_attn.energies.heads import head_width
from implicit_attn.energies.tokens import check_tokens, hide
from implicit_attn.updates.hyperset import HyperSETLayer, build_step_sizes
from implicit_attn.updates.spins import KineticAttention
from solvers.core.argument_names import hint_names
from solvers.core.checks import require_count, require_flag, require_positive


class RecurrentBackbone(nn.Module):
    """A sequence of ``layers``, each applied ``iterations`` times.

    Args:
        dim: features d of a token.
        layers: modules with ``context(x, times)``, which is called once with the input (B, N, d) and the
            times 1 .. T of all iterations, and ``advance(z, context, index, mask)``, which returns the
            state (B, N, d) after the iteration at ``times[index]``.
        iterations: number T of iterations of each layer in training; a call may use any other number.

    Shapes: tokens (B, N, d) -> (B, N, d); ``mask`` (B, N) bool, False for masked tokens, which keep
    their input and do not influence other tokens.
    """

    def __init__(self, dim: int, layers: Iterable[nn.Module], iterations: int = 12) -> None:
        super().__init__()
        self.dim = require_count("dim", dim)
        self.layers: Any = nn.ModuleList(layers)
        self.iterations = require_count("iterations", iterations)

    def forward(
        self,
        x: Tensor,
        *,
        iterations: int | None = None,
        mask: Tensor | None = None,
        z0: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the tokens after ``iterations`` of each layer, by default as many as in training.

        ``z0`` is the initial state; None for the input. The state after each iteration is appended to a
        list ``states``.
        """
        count = self.iterations if iterations is None else require_count("iterations", iterations)
        check_tokens(x, mask, type(self).__name__, dim=self.dim, tokens=True)
        times, z = torch.arange(1, count + 1, device=x.device), hide(x, mask)
        contexts = [layer.context(z, times) for layer in self.layers]
        z = z if z0 is None else hide(z0, mask)
        for layer, context in zip(self.layers, contexts, strict=True):
            for index in range(count):
                z = layer.advance(z, context, index, mask)
                if states is not None:
                    states.append(keep_masked(z, x, mask))
        return keep_masked(z, x, mask)

    def states(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the input and the state after each iteration, (1 + layers * iterations, B, N, d)."""
        states = [x]
        self(x, iterations=iterations, mask=mask, states=states)
        return torch.stack(states)

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}"


def keep_masked(z: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``z`` (B, N, d) with masked tokens replaced by those of ``x``."""
    return z if mask is None else torch.where(mask.unsqueeze(-1), z, x)


class TransformerLayer(nn.Module):
    """Pre-norm layer ``X + MHSA(LN(X))``, then ``X + W_2 relu(W_1 LN(X))``, with biases in LN only."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.width = head_width(dim, heads, None)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.queries_keys_values = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.widen = nn.Linear(dim, require_count("hidden", hidden), bias=False)
        self.narrow = nn.Linear(hidden, dim, bias=False)

    def context(self, x: Tensor, times: Tensor) -> None:
        """Return None: a step does not depend on the input or on time."""

    def advance(self, z: Tensor, context: Any, index: int, mask: Tensor | None = None) -> Tensor:
        pairs = None
        if mask is not None:
            # Masked tokens attend to themselves, so that no row of the softmax is empty.
            itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
            pairs = mask[:, None, None, :] | itself
        split = self.queries_keys_values(self.attention_norm(z)).unflatten(-1, (-1, self.width))
        query, key, value = split.transpose(1, 2).chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=pairs)
        moved = z + self.output(attended.transpose(1, 2).flatten(2))
        moved = moved + self.narrow(F.relu(self.widen(self.feedforward_norm(moved))))
        return keep_masked(moved, z, mask)


class SharedTransformer(RecurrentBackbone):
    """A pre-norm transformer whose layer is repeated: a Universal Transformer without halting.

    Args:
        dim, heads: features d of a token, number of attention heads, a divisor of d.
        hidden: number of hidden units of the feed-forward part; None for 4 d.
        layers: number of layers.
        iterations: iterations of each layer.

    Source: Dehghani et al., "Universal Transformers" (https://arxiv.org/abs/1807.03819); the baseline
    of Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646).
    """

    @hint_names
    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        layers: int = 1,
        iterations: int = 12,
    ) -> None:
        hidden, number = 4 * dim if hidden is None else hidden, require_count("layers", layers)
        made = [TransformerLayer(dim, heads, hidden) for _ in range(number)]
        super().__init__(dim, made, iterations)


class EnergyTransformerLayer(nn.Module):
    r"""A step ``X <- X - eta dE/dg`` at ``g = gain LayerNorm(X) + shift``, a scalar gain, with ::

        E(g) = -beta^-1 sum_h sum_i log sum_j exp(beta q_hi.k_hj) - 1/2 sum_i sum_m relu(xi_m.g_i)^2

    and ``q = W_Q g, k = W_K g``. The Jacobian of the norm, which is the Hessian of a convex
    Lagrangian, is omitted; small steps still descend E. ``attention`` are options of ``SoftmaxAttention``.
    """

    def __init__(
        self, dim: int, heads: int, memories: int, *, step_size: float = 0.1, **attention: Any
    ) -> None:
        super().__init__()
        self.step_size = require_positive("step_size", step_size)
        self.attention = SoftmaxAttention(dim, heads, norm=None, **attention)
        self.feedforward = ReLUFeedForward(dim, memories, norm=None, bias=False)
        self.gain, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(dim))

    def activation(self, z: Tensor) -> Tensor:
        """Return ``g(z)``, (B, N, d)."""
        return torch.addcmul(self.shift, self.gain, F.layer_norm(z, z.shape[-1:]))

    def energy(self, z: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Return ``E(g(z))`` of each sample, (B,)."""
        g = self.activation(hide(z, mask))
        return self.attention(g, mask=mask) + self.feedforward(g, mask=mask)

    def context(self, x: Tensor, times: Tensor) -> None:
        """Return None: a step does not depend on the input or on time."""

    def advance(self, z: Tensor, context: Any, index: int, mask: Tensor | None = None) -> Tensor:
        g = self.activation(z)
        gradient = self.attention.grad(g, mask=mask)
        gradient = gradient + self.feedforward.straight_gradient(g, mask=mask)
        return torch.sub(z, gradient, alpha=self.step_size)


class EnergyTransformer(RecurrentBackbone):
    """The Energy Transformer, which descends one energy of attention and a Hopfield network.

    Args:
        dim, heads: features d of a token, number of attention heads.
        memories: number of memories of the Hopfield network, rows of xi; None for 4 d.
        layers: number of layers.
        iterations: iterations of ``RecurrentBackbone``.
        options: options of the layers:
            step_size: step size eta of the descent; the paper uses 0.1 for images.
            bias: biases of queries and keys, ``q = W_Q g + b_Q``, ``k = W_K g + b_K``, initially zero.
            beta: inverse temperature, or one per head; None for ``1 / sqrt(p)`` with head width p.
            learned_beta: whether to train one inverse temperature per head.
            exclude_self: whether no token attends to itself, as in the paper (sum over ``B != C``); its
                published code sums over all tokens.

    Source: Hoover et al., "Energy Transformer" (NeurIPS 2023, https://arxiv.org/abs/2302.07253),
    equations 1 to 6.
    """

    @hint_names
    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int | None = None,
        *,
        layers: int = 1,
        iterations: int = 12,
        **options: Any,
    ) -> None:
        memories = 4 * dim if memories is None else memories
        number = require_count("layers", layers)
        made = [EnergyTransformerLayer(dim, heads, memories, **options) for _ in range(number)]
        super().__init__(dim, made, iterations)


@dataclass(frozen=True)
class Trajectory:
    """States, energies and features along the iterations; entry t is after t iterations.

    Attributes:
        states: (1 + T, B, N, d).
        attention_energy, feedforward_energy: (1 + T, B), energies of the layer that makes the next step,
            or of the last layer for the last state.
        features: (1 + T, B, heads, N, p), normalised projections ``RMSNorm(W_h^T x)``.
    """

    states: Tensor
    attention_energy: Tensor
    feedforward_energy: Tensor
    features: Tensor


class HyperSET(RecurrentBackbone):
    """Hyper-SET as published, with one or a few shared layers that are unrolled.

    Args:
        dim, heads: features d of a token, number of attention heads.
        memories: number M of columns of D (in the paper d for images, 4 d for Sudoku); None for d.
        layers: number of layers with separate weights and step sizes.
        share_steps: whether all layers share one step-size network, as in the official code.
        iterations: iterations of each layer. Time-dependent step sizes are smooth functions of time, so
            they extrapolate to later times than in training; low-rank differences stay at their last.
        step_size: "conditioned-state" (in the paper for classification), "conditioned-input" (for Sudoku
            and masked images), "learned" or "fixed".
        options: further arguments of ``HyperSETLayer``: initial_step, time_dim, attention,
            feedforward, head_dim, epsilon, lora_rank, lora_scale, beta, gains, step_network, descent.

    Source: Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646).
    """

    @hint_names
    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int | None = None,
        *,
        layers: int = 1,
        iterations: int = 12,
        step_size: str = "conditioned-state",
        share_steps: bool = False,
        **options: Any,
    ) -> None:
        options |= {"step_size": step_size, "iterations": iterations}
        shared = None
        if require_flag("share_steps", share_steps):
            more = {"initial": options.pop("initial_step", None)}
            more["time_dim"] = options.pop("time_dim", 512)
            more["network"] = options.pop("step_network", "paper")
            shared = options["step_size"] = build_step_sizes(step_size, dim, **more)
        memories, number = dim if memories is None else memories, require_count("layers", layers)
        made = [HyperSETLayer(dim, heads, memories, **options) for _ in range(number)]
        super().__init__(dim, made, iterations)
        self.step_sizes = shared

    def trajectory(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Trajectory:
        """Return states, energies and subspace features of the iterations from ``x`` (B, N, d)."""
        states = self.states(x, iterations=iterations, mask=mask)
        count = (len(states) - 1) // len(self.layers)
        plan = [(layer, index) for layer in self.layers for index in range(count)]
        rows = [
            layer.observe(z, index, mask)
            for z, (layer, index) in zip(states, [*plan, plan[-1]], strict=True)
        ]
        return Trajectory(states, *(torch.stack(column) for column in zip(*rows, strict=True)))


class HyperSETEquilibrium(nn.Module):
    """The minimiser of ``HyperSETEnergy`` for the input tokens, computed by a ``DEQ`` layer.

    Args:
        dim, heads, memories: see ``HyperSET``.
        iterations: maximum number of evaluations per sample, which a call may change.
        layer: further options of ``DEQ`` (solver, tolerance, adjoint, on_failure, ...).
        options: further arguments of ``HyperSETEnergy``: attention, feedforward, head_dim, norm,
            bound, weight, maximum, context.

    Shapes: tokens (B, N, d) -> (B, N, d), the equilibrium for that input. The attribute ``layer`` is
    the ``DEQ``; ``layer.last`` reports the latest solve.
    """

    @hint_names
    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int | None = None,
        *,
        iterations: int = 50,
        layer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        energy = HyperSETEnergy(dim, heads, dim if memories is None else memories, **options)
        self.dim, self.iterations = dim, require_count("iterations", iterations)
        settings: dict[str, Any] = {"max_steps": iterations} | (layer or {})
        self.layer = DEQ(energy, **settings)

    def forward(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return self.layer(x, mask, **_limit(iterations))


def _limit(iterations: int | None) -> dict[str, int]:
    return {} if iterations is None else {"max_steps": iterations}


class EquilibriumTransformer(nn.Module):
    """A stack of equilibrium blocks ``x -> x + O z*(x)`` with separate weights.

    Args:
        dim, heads: features d of a token, number of attention heads.
        hidden: number of hidden units M of a block; None for ``2 d``.
        layers: number of blocks.
        iterations: maximum number of evaluations per sample and block, which a call may change.
        layer: further options of the blocks' ``DEQ`` (solver, tolerance, adjoint, on_failure, ...).
        options: further arguments of :class:`implicit_attn.EquilibriumBlock`: attention ("self" or
            None), activation, state_dim, causal, curvature, dropout.

    Shapes: tokens and mask as in ``RecurrentBackbone``. ``blocks[k].last`` reports the latest solves.
    """

    @hint_names
    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        layers: int = 1,
        iterations: int = 50,
        layer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dim, self.iterations = dim, require_count("iterations", iterations)
        settings: dict[str, Any] = {"max_steps": iterations} | (layer or {})
        self.blocks: Any = nn.ModuleList(
            EquilibriumBlock(dim, heads, hidden, layer=settings, **options)
            for _ in range(require_count("layers", layers))
        )

    def forward(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        padding = None if mask is None else ~mask
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding, **_limit(iterations))
        return x

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}"


class SpinTransformer(nn.Module):
    """A stack of spin modules ``x -> m*(x)``, each the steady state ``m*`` of a ``KineticAttention``.

    Only the attention weights mix features.

    Args:
        dim, heads: features d of a token, number of attention heads, at most d / 2.
        layers: number of modules with separate weights.
        iterations: maximum number of evaluations per sample and module, which a call may change.
        layer: further options of the modules' ``DEQ`` (solver, tolerance, adjoint, on_failure, ...);
            a ``max_steps`` among them is ``iterations``.
        options: further arguments of :class:`implicit_attn.updates.KineticAttention`: beta, closure,
            scale, self_coupling, causal.

    Shapes: tokens and mask as in ``RecurrentBackbone``. ``steady[k].last`` reports the latest solves.

    Source: Bal, "Spin-model transformers", https://mcbal.github.io/post/spin-model-transformers/.
    """

    @hint_names
    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        layers: int = 2,
        iterations: int = 50,
        layer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        number = require_count("layers", layers)
        settings: dict[str, Any] = {"max_steps": iterations, **(layer or {})}
        self.dim, self.iterations = dim, settings["max_steps"]
        self.steady: Any = nn.ModuleList(
            DEQ(KineticAttention(dim, heads, **options), **settings) for _ in range(number)
        )

    def forward(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        z = x
        for steady in self.steady:
            z = steady(z, mask, **_limit(iterations))
        return keep_masked(z, x, mask)

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}"
