# %% [markdown]
# # Does your layer converge?
#
# A layer that is defined by a fixed point $z = f(z, x)$ is worth as much as its solves. This notebook
# looks at a layer in four ways: the residual of every evaluation, several solvers, the spectral radius at
# the fixed point, and what a larger scale of the weights does. Put your own energy in the place of
# `build`.

# %%
import matplotlib.pyplot as plt
import torch

from implicit_attn import DEQ, solvers
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward
from implicit_attn.updates import GradientStep


def build(scale=1.0):
    torch.manual_seed(0)
    attention = BiSoftmaxAttention(16, heads=2)
    energy = scale * attention + scale * ReLUFeedForward(16, 32, bound=0.7) + Quadratic()
    return DEQ(energy, max_steps=100, on_failure="ignore")


x = torch.randn(8, 12, 16, generator=torch.Generator().manual_seed(1))
layer = build()
solution = layer.solve(x, record=True)
print("converged", int(solution.converged.sum()), "of", len(x))
print("evaluations", solution.evaluations.tolist())

# %% [markdown]
# ## The trace of a solve
#
# `record=True` keeps the relative residual $|f(z) - z| / |f(z)|$ of every evaluation, and the energy.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.semilogy(solution.trace.residual.T, color="tab:blue", alpha=0.4)
left.set(xlabel="evaluation", ylabel="relative residual", title="Residual, a line a sample")
drop = solution.trace.energy - solution.trace.energy.nan_to_num(torch.inf).amin(1, keepdim=True)
right.semilogy(drop.T.clamp_min(1e-7), color="tab:red", alpha=0.4)
right.set(xlabel="evaluation", ylabel="energy above the lowest", title="Energy")
figure.tight_layout()

# %% [markdown]
# ## Solvers
#
# The same layer, solved to $10^{-5}$ by several methods, and by repeating the update, written by hand:


# %%
@torch.no_grad()
def repeated(layer, count=100):
    """Relative residuals of each sample after ``count`` repetitions of the update."""
    z = x
    for _ in range(count):
        before, z = z, layer.update(z, x)
    return (z - before).flatten(1).norm(dim=1) / z.flatten(1).norm(dim=1)


tight = solvers.Tolerance(1e-5)
print(f"{'method':10s} converged  median of the evaluations")
for method in (solvers.LBFGS(), solvers.Anderson(), solvers.Broyden()):
    found = layer.solve(x, solver=method, tolerance=tight)
    share, count = found.converged.double().mean(), found.evaluations.median()
    print(f"{type(method).__name__:10s} {share:8.0%}  {count:5d}")
print(f"{'repeated':10s} {(repeated(layer) < 1e-5).double().mean():8.0%}    100")

# %% [markdown]
# ## Why: the spectral radius
#
# Near the fixed point, repetition multiplies the error by the spectral radius of the Jacobian at each
# step: below one it converges, above one it cannot. The methods above do not depend on it in this way.

# %%
radius = layer.spectral_radius(solution.value.detach(), x)
print(f"spectral radius: median {radius.median():.3f}, largest {radius.max():.3f}")

# %% [markdown]
# The update is a gradient step of size one. Where the curvature of the energy is above two it goes too
# far. A smaller step has the same fixed points and a smaller radius, so repetition converges, if slowly:

# %%
print("step  radius  residual after 100 repetitions")
for step in (1.0, 0.7, 0.4, 0.2):
    slower = DEQ(GradientStep(layer.update.energy, step))
    radius = slower.spectral_radius(solution.value.detach(), x)
    print(f"{step:4.1f}  {radius.median():6.3f}  {repeated(slower).median():.1e}")

# %% [markdown]
# ## Larger weights
#
# Training often enlarges the weights of a layer. What would happen then?

# %%
scales = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
counts = []
for scale in scales:
    layer = build(scale)
    found = layer.solve(x)
    radius = layer.spectral_radius(found.value.detach(), x).median()
    counts.append(found.evaluations.double().mean())
    share, plain = found.converged.double().mean(), (repeated(layer) < 1e-3).double().mean()
    print(
        f"scale {scale:4.2f}  radius {radius:6.2f}  converged: the layer {share:4.0%}, repeated {plain:4.0%}"
    )

# %%
plt.figure(figsize=(5, 3))
plt.plot(scales, counts, "o-")
plt.xscale("log", base=2)
plt.xlabel("scale of the energies")
plt.ylabel("mean of the evaluations")
plt.title("Evaluations of the layer against the scale of its weights")

# %% [markdown]
# If your layer does not converge, look at the radius, bound the weights (`bound=`), add `Quadratic()`, or
# take `EquilibriumBlock`, which has one minimum whatever its weights. See
# [when a solve fails](../guide/failing.md); `python examples/study_convergence.py` makes such a study
# of trained models.
