# %% [markdown]
# # An energy of your own
#
# This page starts from a blank file and ends with a trained layer. You write an energy: a function
# $E(z; x)$ that returns one number per sample. The layer returns the state $z^*(x)$ that minimises it, and
# gradients flow through the minimum by implicit differentiation.
#
# ## The task
#
# We classify the handwritten digits of scikit-learn. An image of 8 x 8 pixels becomes 16 tokens, one for
# each patch of 2 x 2 pixels. The network embeds the patches, applies one layer to the tokens, and
# classifies their mean.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import solvers
from implicit_attn import DEQ, check_energy

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


model = fit(lambda: DEQ.from_energy(Wells(), tolerance=1e-3, on_failure="ignore"))
print(f"Wells: test accuracy {accuracy(model):.1%}")
print(model.layer.last.summary())

# %% [markdown]
# The layer ruins the accuracy, although its solves on the test images converged. The state meets the input
# only in $|z - x|^2$, so the layer applies one fixed map to every token and cannot combine tokens. Such a
# layer is a proximal step.
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
# - **The spectral norms of the weights that multiply the state are bounded.** `spectral_norm` keeps the
#   norms of W and Q close to 1, and keys have length 1. With the factor 0.7, each of the two terms lowers
#   the curvature of $|z|^2/2$ by about 0.49 at most. The curvature stays positive, so there is one minimum.
# - **The state starts at zero**, by `init="zeros"`. The input already acts inside the energy, so it is not
#   needed as a starting point.
# - **A skip connection** adds the input to the output. At the start of training the network is then close
#   to the network without a layer, and the layer learns a correction.


# %%
class MyEnergy(nn.Module):
    def __init__(self, bound=spectral_norm):
        super().__init__()
        self.W, self.Q = (bound(nn.Linear(DIM, DIM, bias=False)) for _ in range(2))
        self.U, self.q, self.k = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, z, x):  # (B, N, d), (B, N, d) -> (B,)
        hidden = F.relu(0.7 * self.W(z) + self.U(x))
        scores = (0.7 * self.Q(z) + self.q(x)) @ F.normalize(self.k(x), dim=-1).mT
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
# and tests that no sample influences another. The line "proximal" says that the input enters by more than
# the distance to the state.

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
# The layer learns. It was trained for 184 steps and on another split of the digits than the program in
# the README, which takes 400 steps and has an accuracy of 96.7 %. `deq.last` holds a status, a residual
# and a number of evaluations for each test image, and `summary()` puts them in one line. After a backward
# pass, `deq.last.adjoint.solution` describes the solve for the gradients in the same way.
#
# ## Without the bounds
#
# Without bounds on W and Q, nothing keeps the energy convex, and it may even be unbounded below. We train
# such a network for 3 epochs and count the statuses of all solves. `on_failure="ignore"` turns off the
# warning that you would otherwise see.

# %%
statuses = []
free = Residual(MyEnergy(bound=lambda linear: linear), on_failure="ignore")
free.deq.observer = lambda x, mask, solution: statuses.append(solution.status)
other = fit(lambda: free, epochs=3)
print(f"without bounds: test accuracy {accuracy(other):.1%}")
for status, count in zip(*torch.cat(statuses).unique(return_counts=True)):
    print(f"{solvers.Status(int(status)).name:10s} {count:6d} samples")

# %% [markdown]
# A sample whose solve failed has no equilibrium to differentiate. If you see many failures in your own
# layer, bound its weights first. [What can go wrong](../guide/failing.md) lists other remedies.
#
# ## More iterations at test time
#
# A trained layer is an equation, so you can solve it more or less accurately. Here the same network runs
# with several tolerances:

# %%
print("tolerance  test accuracy  evaluations (mean)  distance to the most accurate state")
with torch.no_grad():
    x = model.embed(test) + model.position
    exact = deq.solve(x, tolerance=1e-6, max_steps=200).value
for rtol in (0.3, 0.1, 1e-2, 1e-3, 1e-4, 1e-5):
    deq.tolerance = solvers.Tolerance(rtol)
    right = accuracy(model)
    with torch.no_grad():
        solution = deq.solve(x)
    error = (solution.value - exact).norm() / exact.norm()
    count = solution.evaluations.double().mean()
    print(f"{rtol:9.0e}  {right:13.1%}  {count:18.1f}  {error:.1e}")

# %% [markdown]
# At tight tolerances the accuracy no longer changes, because the network uses the equilibrium itself.
#
# ## Exchange a term after training
#
# The output minimises a sum of terms, so you can exchange one of them after training. Here a `DataTerm`
# says what was observed, $w|Az - y|^2/2$, and an energy with learned memories says what digits look like.
# In training the operator A is the identity, and the layer learns to remove noise. A class that inherits
# from `Energy` can be added to other energies.

# %%
from implicit_attn import Energy
from implicit_attn.energies import DataTerm


class Memories(Energy):
    def __init__(self, patterns):
        super().__init__()
        self.patterns, self.metric = (
            nn.Parameter(patterns.clone()),
            nn.Parameter(1.5 * torch.eye(64)),
        )
        self.sharpness = nn.Parameter(torch.tensor(7.0))

    def forward(self, z):  # (B, 64) -> (B,)
        z, patterns = z @ self.metric, self.patterns @ self.metric
        distances = z.square().sum(1, keepdim=True) + patterns.square().sum(1) - 2 * z @ patterns.T
        return -(-0.5 * self.sharpness * distances).logsumexp(1) / self.sharpness


def noisy(images, sigma):
    y = images + sigma * torch.randn_like(images)
    return {"y": y, "weight": torch.ones_like(y) / sigma**2}


torch.manual_seed(0)
flat_train, flat_test, _, _ = train_test_split(
    images.flatten(1), labels, test_size=360, random_state=0
)
data = DataTerm()
denoiser = DEQ(
    data.weighted(0.05) + Memories(flat_train[:128]),
    init=lambda x: x["y"],
    tolerance=1e-3,
    on_failure="ignore",
)
optimizer = torch.optim.Adam(denoiser.parameters(), lr=3e-3)
for _ in range(4):
    for rows in torch.randperm(len(flat_train)).split(48):
        sigma = 0.05 + 0.45 * torch.rand(len(rows), 1)
        optimizer.zero_grad()
        F.mse_loss(denoiser(noisy(flat_train[rows], sigma)), flat_train[rows]).backward()
        optimizer.step()
print(denoiser.last.summary())

# %% [markdown]
# Now the operator becomes the mean over blocks of 2 x 2 pixels, and the layer doubles the resolution.
# `layer.replace(old, new)` returns a layer with one term exchanged, which shares all other parameters.
# Nothing is trained again.


# %%
def coarse(z):  # (B, 64) -> (B, 16)
    return F.avg_pool2d(z.view(-1, 1, 8, 8), 2).flatten(1)


def enlarge(y):  # (B, 16) -> (B, 64)
    return F.interpolate(y.view(-1, 1, 4, 4), scale_factor=2, mode="bilinear").flatten(1)


sharpener = denoiser.replace(data, DataTerm(coarse))
with torch.no_grad():
    observed = noisy(flat_test, torch.tensor(0.3))
    small = noisy(coarse(flat_test), torch.tensor(0.05))
    denoised = denoiser(observed)
    sharp = sharpener.solve(small, z0=enlarge(small["y"]), max_steps=200)
print(sharp.summary())
rows = {
    "noisy": observed["y"],
    "denoised": denoised,
    "enlarged": enlarge(small["y"]),
    "restored": sharp.value,
    "true": flat_test,
}
for name, row in rows.items():
    print(f"{name:9s} mean squared error {F.mse_loss(row, flat_test):.4f}")
figure, axes = plt.subplots(len(rows), 8, figsize=(6, 4))
for line, (name, row) in zip(axes, rows.items()):
    for place, image in zip(line, row):
        place.imshow(image.view(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
        place.set(xticks=[], yticks=[])
    line[0].set_ylabel(name, rotation=0, ha="right", va="center")
figure.suptitle("One trained energy, two tasks")

# %% [markdown]
# "denoised" was made from "noisy", and "restored" from the coarse images, of which "enlarged" is a plain
# interpolation. [One energy, many tasks](../guide/restoration.md) has more tasks and larger images.
# [Energies](../guide/energies.md) explains sums, masks and closed-form gradients, and
# [well-posedness](../theory/well-posedness.md) derives the bounds.
