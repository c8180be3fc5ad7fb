# %% [markdown]
# # A Sudoku board filling in
#
# This model has learned to solve Sudoku from boards alone; nobody told it a rule. It repeats one update,
# whose weights are the same for all cells and all digits, until its answer is consistent. Harder boards
# take more repetitions.

# %%
from typing import Any

import matplotlib.pyplot as plt
import torch

from implicit_attn import load_pretrained
from implicit_attn.data import load_sudoku
from implicit_attn.demo.boards import draw_frame, frames_of

model: Any = load_pretrained("sudoku-solver")
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

# %% [markdown]
# Puzzles are generated here: a board is filled at random and cells are cleared while the solution stays
# unique.

# %%
boards = load_sudoku(1, 8, source="generated", seed=3)
puzzles, solutions = boards.test_puzzles, boards.test_solutions
print("givens:", (puzzles > 0).sum(1).tolist())

# %% [markdown]
# ## Solving
#
# `model.solve` repeats the update until the answer of each board is consistent: no learned group has a digit
# twice. Boards may also be strings. With `stop="converged"` it goes on until the state changes by less than
# a thousandth.

# %%
with torch.no_grad():
    answer = model.solve(puzzles)
solved = (answer.digits == solutions).all(1)
print("solved    ", solved.tolist())
print("consistent", answer.consistent.tolist())
print("iterations", answer.evaluations.tolist())

# %% [markdown]
# `answer.consistent` says which boards agree with the learned groups, without knowing their solutions. A
# board that does not agree is reported with a warning. `print` draws a board:

# %%
with torch.no_grad():
    print(model.solve(puzzles[0]))

# %% [markdown]
# ## One board
#
# Found digits are the fainter the less certain the model is; wrong ones are red.

# %%
number = int((puzzles > 0).sum(1).argmin())
frames = frames_of(model, puzzles[number], at=(1, 3, 6, 12, 24))
figure, grid = plt.subplots(1, len(frames), figsize=(13, 3.1))
for axes, frame in zip(grid, frames):
    draw_frame(axes, puzzles[number], solutions[number], frame)
figure.suptitle(f"A puzzle with {int((puzzles[number] > 0).sum())} givens", y=1.05)

# %% [markdown]
# ## How many iterations?
#
# Cells that are right after each iteration, one line a board:

# %%
right = []
with torch.no_grad():
    for logits in model.trajectory(puzzles, 40):
        right.append((logits.argmax(-1) + 1 == solutions).double().mean(1))
plt.figure(figsize=(6, 3))
plt.plot(range(1, 41), 100 * torch.stack(right))
plt.xlabel("iteration")
plt.ylabel("cells that are right (%)")
plt.title("Eight boards")

# %% [markdown]
# `python examples/train_boards.py --evaluate list --weights sudoku-solver` prints the table
# of all numbers of givens and iterations, and [the results](../results.md) compare it with other solvers.
