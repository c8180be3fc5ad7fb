"""What ``implicit-attn`` can do, in a line each; nothing is imported for it."""

from __future__ import annotations

COMMANDS = {
    "demo": "train a classifier of digits beside simpler models, and report on it (a minute)",
    "train": "train a model: images, language, Sudoku",
    "run": "programs about small systems, seconds to minutes long",
    "study": "studies of trained models and of small systems: figures and tables",
    "info": "versions, devices, kernels, data and cache folders, for a report of an error",
    "weights": "the trained models that come with the package",
}
TRAIN = {
    "classify": "an equilibrium block reads digits or MNIST, beside simpler models",
    "language-model": "a character language model whose sublayers are steps of descent",
    "masked-images": "fill in hidden patches of images: Hyper-SET or a baseline",
    "mnist-spins": "mean-field attention of coupled vector spins reads MNIST",
    "solve-sudoku": "an update that learns to solve Sudoku from boards alone",
    "sudoku": "Hyper-SET or a baseline completes Sudoku boards",
    "vit-images": "Hyper-SET or a baseline classifies images",
}
RUN = {
    "bare-attention": "attention with nothing but couplings learns digits without backpropagation",
    "easy-to-hard": "a local block trained on small rings solves larger ones",
    "hopfield-density": "a Hopfield memory as a density of handwritten digits",
    "potts-recovery": "which models find the couplings of a Potts model in its samples",
    "sudoku-potts": "Sudoku by the couplings of a Potts model learned from boards",
    "tap-vs-exact": "naive mean field and adaptive TAP against enumeration",
}
GROUPS = {"train": TRAIN, "run": RUN}
EPILOG = {
    "": "implicit-attn COMMAND --help says more of a command. Results go to ./runs.",
    "train": "implicit-attn train PROGRAM --help lists the options. Results go to ./runs.",
    "run": "implicit-attn run PROGRAM --help lists the options. Results go to ./runs.",
}
