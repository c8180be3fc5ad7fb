# %% [markdown]
# # Spins, mean fields and TAP
#
# Attention layers and models of magnets share an equation. Spins $S_i$ with couplings $J_{ij}$ and fields
# $x_i$ have the distribution $P(S) \propto \exp(\tfrac12 \sum_{ij} S_i J_{ij} S_j + \sum_i x_i S_i)$, and
# we want their means $m_i = \langle S_i \rangle$. An exact sum has $2^N$ terms. Mean-field theories solve
# fixed-point equations instead:
#
# - **naive**: $m_i = \tanh(x_i + \sum_j J_{ij} m_j)$;
# - **adaptive TAP** ([Opper and Winther](https://arxiv.org/abs/cond-mat/0105208)):
#   $m_i = \tanh(x_i + \sum_j J_{ij} m_j - V_i m_i)$, where the Onsager term $V_i m_i$ removes the influence
#   of a spin on itself through its neighbours. The variances $V_i$ follow from the response of the whole
#   system.

# %%
import matplotlib.pyplot as plt
import torch

from implicit_attn import solvers
from implicit_attn.studies import exact_moments, random_ising

model = random_ising(10, strength=1.0, generator=torch.Generator().manual_seed(0))
print("couplings", tuple(model.couplings.shape), " fields", tuple(model.field.shape))

# %% [markdown]
# ## One model
#
# Ten spins have 1,024 configurations, so we can compute the exact means.

# %%
exact = exact_moments(model)
means = {}
for order in ("naive", "adaptive"):
    solution = solvers.adaptive_tap(model.couplings, model.field, site=model.site, order=order)
    means[order] = solution.value.mean
    error = (means[order] - exact.mean).square().mean().sqrt()
    print(f"{order:8s} error of the means {error:.4f}, evaluations {solution.evaluations.item()}")

# %%
plt.figure(figsize=(3.6, 3.6))
plt.plot([-1, 1], [-1, 1], color="grey", linewidth=0.8)
for (order, mean), marker in zip(means.items(), "so"):
    plt.plot(exact.mean.flatten(), mean.flatten(), marker, label=order, fillstyle="none")
plt.xlabel("exact mean of a spin")
plt.ylabel("mean-field theory")
plt.title("Ten spins")
plt.legend()

# %% [markdown]
# ## Stronger couplings
#
# With stronger couplings the spins freeze, and both theories become inaccurate, TAP later than the naive
# theory.

# %%
strengths = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0]
errors = {"naive": [], "adaptive": []}
for strength in strengths:
    for order, row in errors.items():
        squares = []
        for seed in range(8):
            model = random_ising(8, strength, torch.Generator().manual_seed(seed))
            solution = solvers.adaptive_tap(
                model.couplings, model.field, site=model.site, order=order, on_failure="ignore"
            )
            squares.append((solution.value.mean - exact_moments(model).mean).square().mean())
        row.append(torch.stack(squares).mean().sqrt().item())
    print(
        f"strength {strength:4.2f}  naive {errors['naive'][-1]:.4f}  TAP {errors['adaptive'][-1]:.4f}"
    )

# %%
plt.figure(figsize=(5, 3))
for order, row in errors.items():
    plt.plot(strengths, row, "o-", label=order)
plt.yscale("log")
plt.xlabel("strength of the couplings")
plt.ylabel("error of the means")
plt.title("Eight spins, eight random models at each strength")
plt.legend()

# %% [markdown]
# ## From spins to a layer
#
# If spins are vectors and couplings are learned, these equations are a layer with tokens as spins.
# `AdaptiveTAPAttention` solves the TAP equations. `MeanFieldAttention` has a small learned network instead
# of the Onsager term: $z_i = x_i + \sum_j J_{ij} z_j - f(z_i)$.

# %%
from implicit_attn import DEQ
from implicit_attn.updates import MeanFieldAttention

torch.manual_seed(0)
layer = DEQ(MeanFieldAttention(6, 8))
found = layer.solve(torch.randn(4, 6, 8))
print(found)

# %% [markdown]
# [Spins](../theory/spins.md) derives the theories and lists the solvers and models that use them.
