# %% [markdown]
# # Your first layer in ten minutes
#
# A layer usually computes its output by a formula. The layers of this package search for it: the output
# is the state z with the least energy $E(z, x)$ for the input x. You write the energy, and the layer finds
# the minimum and differentiates through it. The layer of this page removes noise from signals that are
# piecewise constant.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

from implicit_attn import DEQ, Energy
from implicit_attn.energies import check_energy

torch.manual_seed(0)


def signals(count):
    """Constant runs of 8 values at random heights: clean, and with noise, (count, 64) each."""
    clean = torch.randn(count, 9).repeat_interleave(8, dim=1)[:, 3:67]
    return clean, clean + 0.3 * torch.randn_like(clean)


clean, noisy = signals(4)
plt.figure(figsize=(7, 2))
plt.plot(noisy[0], ".", color="grey", label="input x")
plt.plot(clean[0], color="black", label="wanted")
plt.title("A signal and its noise")
plt.legend()

# %% [markdown]
# ## The energy
#
# An energy returns one number per sample. This one has two terms: z should be close to x, and the
# responses of z to three small filters should be small. The filters are learned.


# %%
class Smooth(Energy):
    def __init__(self):
        super().__init__()
        self.filters = nn.Parameter(0.3 * torch.randn(3, 1, 3))

    def forward(self, z, x):
        response = F.conv1d(z.unsqueeze(1), self.filters)
        near = 0.5 * (z - x).square().sum(1)
        return near + (response.square() + 0.01).sqrt().flatten(1).sum(1)


energy = Smooth()
energy(noisy, noisy)

# %% [markdown]
# Automatic differentiation provides gradient and Hessian. `check_energy` tests what a layer relies on, for
# example that samples do not influence each other. Its warning is expected here: x enters only through
# $|z - x|^2$, which is right for removing noise.

# %%
print(check_energy(energy, noisy, noisy))

# %% [markdown]
# ## The layer
#
# `DEQ(energy)` is an `nn.Module` that maps x to the minimum. `layer.last` has the status of the search for
# each sample.

# %%
layer = DEQ(energy, max_steps=100)
z = layer(noisy)
print(layer.last.summary())
print("energy of the input ", energy(noisy, noisy).tolist())
print("energy of the output", energy(z, noisy).tolist())

# %% [markdown]
# ## Training
#
# Train the layer like any other. Gradients come from the equation that holds at the minimum, so memory
# does not grow with the number of iterations.

# %%
optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
for step in range(61):
    clean, noisy = signals(64)
    loss = F.mse_loss(layer(noisy), clean)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(
            f"step {step:2d}  error {loss.item():.4f}, of the input {F.mse_loss(noisy, clean).item():.4f}"
        )

# %%
clean, noisy = signals(4)
with torch.no_grad():
    z = layer(noisy)
plt.figure(figsize=(7, 2))
plt.plot(noisy[0], ".", color="grey", label="input x")
plt.plot(clean[0], color="black", label="wanted")
plt.plot(z[0], color="tab:red", label="the layer's z")
plt.title("After 60 steps of training")
plt.legend()

# %% [markdown]
# Each filter has learned to sum to nearly zero, so a constant signal costs no energy:

# %%
for row in energy.filters[:, 0].tolist():
    print([round(value, 2) for value in row], " sum", round(sum(row), 2))

# %% [markdown]
# Energies of attention work in the same way ([energies](../guide/energies.md)), and
# [an energy of your own](own_energy.md) trains a classifier.
