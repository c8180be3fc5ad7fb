# %% [markdown]
# # Retrieval of digits by a Hopfield memory
#
# A modern Hopfield network stores patterns $x_\mu$ in an energy,
#
# $$E(z) = \tfrac12 |z|^2 - \beta^{-1} \log \sum_\mu \exp(\beta\, x_\mu \cdot z).$$
#
# One gradient step of size one is softmax attention with the patterns as keys and values ([Ramsauer et
# al.](https://arxiv.org/abs/2008.02217)). Descending this energy from a damaged picture retrieves a stored
# one if $\beta$ is large enough to distinguish the patterns.

# %%
import matplotlib.pyplot as plt
import torch

from implicit_attn import DEQ
from implicit_attn.data import load_digits
from implicit_attn.energies import Hopfield

torch.manual_seed(0)
data = load_digits()
images = data.train_images[:64].flatten(1)
mean = images.mean(0)
patterns = torch.nn.functional.normalize(images - mean)  # 64 patterns of norm 1


def show(axes, z):
    axes.imshow(
        (z * (images - mean).norm(dim=1).mean() + mean).reshape(8, 8).numpy(),
        cmap="gray_r",
        vmin=0,
        vmax=1,
    )
    axes.set_axis_off()


figure, grid = plt.subplots(2, 16, figsize=(9, 1.4))
for axes, pattern in zip(grid.flat, patterns):
    show(axes, pattern)
figure.suptitle("Half of the 64 stored digits")

# %% [markdown]
# ## Damaged pictures
#
# We hide the lower half of five pictures and add noise to five others.

# %%
halves = patterns[:5].clone()
halves[:, 32:] = -mean[32:] / (images - mean).norm(dim=1).mean()  # white
noisy = patterns[5:10] + 0.1 * torch.randn(5, 64)
damaged, wanted = torch.cat([halves, noisy]), torch.arange(10)

# %% [markdown]
# ## Retrieval
#
# The layer starts at the damaged picture, and the energy has no other input. We try three values of
# $\beta$:

# %%
results = {}
for beta in (5.0, 15.0, 60.0):
    layer = DEQ(Hopfield(patterns, beta=beta), max_steps=200)
    results[beta] = layer(damaged[:, None])[:, 0]  # one token per sample
    found = torch.cdist(results[beta], patterns).argmin(1)
    print(
        f"beta {beta:2.0f}: {(found == wanted).sum()} of 10 retrieved, "
        f"distance to the nearest digit {torch.cdist(results[beta], patterns).amin(1).mean():.3f}, "
        f"evaluations {layer.last.evaluations.double().mean():.1f}"
    )

# %%
rows = {"stored": patterns[:10], "damaged": damaged} | {
    f"beta {b:.0f}": z for b, z in results.items()
}
figure, grid = plt.subplots(len(rows), 10, figsize=(7, 3.8))
for line, (name, states) in zip(grid, rows.items()):
    for axes, z in zip(line, states):
        show(axes, z)
    line[0].text(-1.5, 4, name, ha="right", va="center")
figure.suptitle("Retrieval at three temperatures")

# %% [markdown]
# At a small $\beta$ all starts end at one state, an average of the stored digits. At a large $\beta$ the
# minima lie at the patterns themselves. Each step is attention, and its weights show how one pattern is
# selected:

# %%
beta = 15.0
energy = Hopfield(patterns, beta=beta)
z = damaged[1:2, None]
figure, grid = plt.subplots(1, 4, figsize=(9, 1.8), sharey=True)
for step, axes in enumerate(grid):
    weights = torch.softmax(beta * z[0, 0] @ patterns.T, 0).numpy()
    axes.bar(range(64), weights, color="tab:blue")
    axes.set(ylim=(0, 1), xlabel="stored digit", title=f"before step {step + 1}")
    print(f"energy before step {step + 1}: {energy(z).item():.4f}")
    z = z - energy.grad(z)
figure.suptitle("Attention weights on the stored digits", y=1.15)

# %% [markdown]
# The energy falls at every step. It also defines
# [a density and a denoiser](../theory/memories.md#a-density-and-a-denoiser).
