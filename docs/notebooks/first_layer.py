# %% [markdown]
# # Your first layer in ten minutes
#
# A layer of a neural network usually computes its output by a formula. The layers of this package
# *search* for it: the output is the state z with the least energy $E(z, x)$, given the input x. You write
# the energy, the layer finds the minimum and differentiates through it.
#
# Our example takes noise off signals that are constant in pieces.

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
# An energy returns one number per sample. Ours has two terms: z should be close to x, and the responses
# of z to three small filters should be small. The filters are parameters; nobody designs them.


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
# Gradient and Hessian come by automatic differentiation. `check_energy` tells whether an energy keeps
# what a layer relies on, such as that samples do not influence each other. This one takes no mask, so the
# checks of masks are left out.

# %%
print(check_energy(energy, noisy, noisy))

# %% [markdown]
# ## The layer
#
# `DEQ(energy)` is an `nn.Module` from x to the minimum. `layer.last` tells how the search went for each
# sample: 0 means that it converged.

# %%
layer = DEQ(energy, max_steps=100)
z = layer(noisy)
print("status", layer.last.status.tolist(), " evaluations", layer.last.evaluations.tolist())
print("energy of the input ", energy(noisy, noisy).tolist())
print("energy of the output", energy(z, noisy).tolist())

# %% [markdown]
# ## Training
#
# The layer is trained as any other. Gradients come from the equation that holds at the minimum (implicit
# differentiation), so memory does not grow with the number of iterations.

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
            f"step {step:2d}  error {loss.item():.4f}  of the noise {F.mse_loss(noisy, clean).item():.4f}"
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
# Each filter has learned to add up to nearly nothing, so a constant signal costs no energy:

# %%
for row in energy.filters[:, 0].tolist():
    print([round(value, 2) for value in row], " sum", round(sum(row), 2))

# %% [markdown]
# ## Attention
#
# The energies of attention are used in the same way, alone or in sums. They work on tokens (B, N, d) and
# take a mask, False at padding.

# %%
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward

tokens = torch.randn(2, 6, 16)
mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
attention = DEQ(BiSoftmaxAttention(16, heads=2) + ReLUFeedForward(16, 32, bound=0.7) + Quadratic())
z = attention(tokens, mask)
print(tuple(z.shape), attention.last.status.tolist(), attention.last.evaluations.tolist())
