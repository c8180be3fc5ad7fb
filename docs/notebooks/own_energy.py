# %% [markdown]
# # An energy of your own
#
# This page starts from a blank file and ends with a trained layer. You write an energy $E(z; x)$, a function
# that returns one number per sample. The layer returns the state $z^*(x)$ that minimises it, and gradients
# flow through the minimum by implicit differentiation.
#
# ## The task
#
# An image of 8 x 8 pixels, a handwritten digit, becomes 16 tokens, one for each patch of 2 x 2 pixels. The
# network embeds the patches, applies one layer to the tokens, classifies each token and averages the
# logits.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

import solvers
from implicit_attn import DEQ, apply_norm, check_energy

DIM = 32
digits = load_digits()
images = torch.tensor(digits.images[:, None], dtype=torch.float32) / 16
patches, labels = F.unfold(images, 2, stride=2).mT, torch.tensor(digits.target)
train, test, train_labels, test_labels = train_test_split(
    patches, labels, test_size=360, random_state=0
)


class Classifier(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed, self.position = nn.Linear(4, DIM), nn.Parameter(0.5 * torch.randn(16, DIM))
        self.layer = layer
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 10))

    def forward(self, patches):
        return self.head(self.layer(self.embed(patches) + self.position)).mean(1)


def accuracy(model):
    with torch.no_grad():
        return (model.eval()(test).argmax(1) == test_labels).float().mean().item()


def fit(make_layer, epochs=8):
    torch.manual_seed(0)
    model = Classifier(make_layer())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for rows in torch.randperm(len(train)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(train[rows]), train_labels[rows]).backward()
            optimizer.step()
    return model


model = fit(nn.Identity)
print(f"no layer: test accuracy {accuracy(model):.1%}")

# %% [markdown]
# ## A first energy, which does not learn
#
# An energy takes the state `z` and the input `x`, both of shape (B, N, d), and returns a tensor of shape
# (B,). It must not sum over the batch, because every sample has its own minimum. This one keeps the state
# close to the input and adds wells along learned directions.


# %%
class Wells(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(64, DIM))

    def forward(self, z, x):  # (B, N, d), (B, N, d) -> (B,)
        wells = (1 + (z @ self.weight.T).square()).sqrt().sum((1, 2)) / 2
        return 0.5 * (z - x).square().sum((1, 2)) - wells


quiet = {"on_failure": "ignore", "adjoint": solvers.Implicit(on_failure="ignore")}
model = fit(lambda: DEQ.from_energy(Wells(), tolerance=1e-3, **quiet))
print(f"Wells: test accuracy {accuracy(model):.1%}")
print(model.layer.last.summary())

# %% [markdown]
# The layer ruins the accuracy, although its solves on the test images converged. Nothing bounds W,
# which is `self.weight`: training raises $|W|^2/2$ above 1, and E has several minima. Bounded, this
# layer reaches 68 %, hardly more than without a layer (62 %), because it still treats every token alone.
#
# ## An energy that learns
#
# The input belongs inside the terms that have weights. The next energy has two of them:
#
# - **hidden units** $\mathrm{relu}(Wz + Ux)$, whose activity depends on the input;
# - **attention**, where each token of the state has a query, and the keys are made from the input.
#
# Three more choices matter.
#
# - **The spectral norms of the weights that multiply the state are bounded.** `apply_norm` keeps the
#   norms of W and Q at or below 0.7, and keys have length 1. $|z|^2/2$ has curvature 1, and each of the
#   two terms takes away at most $0.7^2 = 0.49$. The curvature stays positive, so there is one minimum.
#   (PyTorch's `spectral_norm` estimates the norm by one step of power iteration, and the true norm may
#   exceed 1 during training.)
# - **The state starts at zero**, by `init="zeros"`, as the input already acts inside the energy.
# - **A skip connection** adds the input to the output, so the layer learns a correction.


# %%
class MyEnergy(nn.Module):
    def __init__(self, bounded=True):
        super().__init__()
        self.W, self.Q = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.U, self.q, self.k = (nn.Linear(DIM, DIM) for _ in range(3))
        if bounded:
            apply_norm(self, "bound", target=0.7, only=("W", "Q"))

    def forward(self, z, x):  # (B, N, d), (B, N, d) -> (B,)
        hidden = F.relu(self.W(z) + self.U(x))
        scores = (self.Q(z) + self.q(x)) @ F.normalize(self.k(x), dim=-1).mT
        return 0.5 * (z.square() - hidden.square()).sum((1, 2)) - scores.logsumexp(-1).sum(1)


class Residual(nn.Module):
    def __init__(self, energy, **options):
        super().__init__()
        self.deq = DEQ.from_energy(energy, init="zeros", tolerance=1e-3, **options)

    def forward(self, x):
        return x + self.deq(x)


# %% [markdown]
# ## Check it
#
# Before you train, let `check_energy` look for mistakes. It compares derivatives with central differences
# and tests that no sample influences another.

# %%
torch.manual_seed(0)
print(check_energy(MyEnergy().eval(), torch.randn(4, 16, DIM), torch.randn(4, 16, DIM)))

# %% [markdown]
# ## Train it

# %%
model = fit(lambda: Residual(MyEnergy()))
deq = model.layer.deq
print(f"MyEnergy: test accuracy {accuracy(model):.1%}")
print(deq.last.summary())

# %% [markdown]
# The layer learns. (The README trains it longer, to 96.7 %.) `deq.last` holds a status, a residual, an
# estimated error and a number of evaluations for each test image. After a backward pass,
# `deq.last.adjoint.solution` has the same for the gradients.
#
# ## Without the bounds
#
# Without bounds on W and Q, nothing keeps the energy convex or even bounded below. We train such a network
# for 3 epochs and count the statuses of all solves; `quiet` turns off the warnings.

# %%
statuses = []
free = Residual(MyEnergy(bounded=False), **quiet)
free.deq.observer = lambda x, mask, solution: statuses.append(solution.status)
other = fit(lambda: free, epochs=3)
print(f"without bounds: test accuracy {accuracy(other):.1%}")
for status, count in zip(*torch.cat(statuses).unique(return_counts=True)):
    print(f"{solvers.Status(int(status)).name:10s} {count:6d} samples")

# %% [markdown]
# These numbers vary between machines. If you see many failures in your own layer, bound its weights first.
# [What can go wrong](../guide/failing.md) lists other remedies.
#
# ## More iterations at test time
#
# You can solve a trained layer more or less accurately. Here the network runs with several tolerances. The
# figure shows another solve, to 1e-6.

# %%
with torch.no_grad():
    x = model.embed(test) + model.position
    exact = deq.solve(x, tolerance=1e-6, max_steps=200, record=True)
for rtol in (0.3, 0.1, 1e-2, 1e-3, 1e-5):
    deq.tolerance = solvers.Tolerance(rtol)
    right = accuracy(model)
    count = deq.last.evaluations.double().mean()
    print(f"tolerance {rtol:5.0e}: test accuracy {right:.1%}, {count:.1f} evaluations")

plt.figure(figsize=(6, 3))
plt.semilogy(exact.trace.residual.T, color="tab:blue", alpha=0.1)
plt.xlabel("evaluation")
plt.ylabel("relative residual")
plt.title("Residuals of the test images, one line each")

# %% [markdown]
# The accuracy hardly depends on the tolerance: a rough equilibrium is enough for the class.
#
# [One energy, many tasks](../guide/restoration.md) exchanges a term after training.
# [Energies](../guide/energies.md) explains sums, masks and closed-form gradients, and
# [well-posedness](../theory/well-posedness.md) derives the bounds.
