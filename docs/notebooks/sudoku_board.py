# %% [markdown]
# # A Sudoku board filling in
#
# This model has learned to solve Sudoku from boards alone, without built-in rules. It repeats one update,
# whose weights are the same for all cells and all digits, until its answer is consistent. Harder boards
# take more iterations.

# %%
from typing import Any

import matplotlib.pyplot as plt
import torch

from implicit_attn import load_pretrained
from implicit_attn.data import load_sudoku

model: Any = load_pretrained("sudoku-solver")
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

# %% [markdown]
# The puzzles are generated: a board is filled at random, and cells are cleared as long as the solution
# stays unique.

# %%
boards = load_sudoku(1, 8, source="generated", seed=3)
puzzles, solutions = boards.test_puzzles, boards.test_solutions
print("givens:", (puzzles > 0).sum(1).tolist())

# %% [markdown]
# ## Solving
#
# `model.solve` repeats the update until the answer of each board is consistent, which means that no learned
# group has a digit twice. Boards may also be strings. With `stop="converged"` the iteration continues until
# the state changes by less than a thousandth.

# %%
with torch.no_grad():
    answer = model.solve(puzzles)
solved = (answer.digits == solutions).all(1)
print("solved    ", solved.tolist())
print("consistent", answer.consistent.tolist())
print("iterations", answer.evaluations.tolist())

# %% [markdown]
# `answer.consistent` says which boards agree with the learned groups, without knowing their solutions. The
# model warns about boards that do not agree. `print` draws a board:

# %%
with torch.no_grad():
    print(model.solve(puzzles[0]))

# %% [markdown]
# ## One board
#
# Givens are black, right digits blue and wrong ones red. The less certain the model is, the fainter the
# digit.

# %%
number = int((puzzles > 0).sum(1).argmin())
puzzle, solution = puzzles[number], solutions[number]


def draw(axes, logits):
    certainty, digits = logits.softmax(-1).max(-1)
    for line in range(10):
        width = 1.6 if line % 3 == 0 else 0.4
        axes.plot([line, line], [0, 9], [0, 9], [line, line], color="black", linewidth=width)
    for cell in range(81):
        given, digit = puzzle[cell].item(), digits[cell].item() + 1
        right = digit == solution[cell].item()
        axes.text(
            cell % 9 + 0.5,
            8.5 - cell // 9,
            str(given or digit),
            ha="center",
            va="center",
            color="black" if given else "tab:blue" if right else "tab:red",
            alpha=1.0 if given else max(certainty[cell].item(), 0.2),
        )
    axes.set_aspect("equal")
    axes.axis("off")


with torch.no_grad():
    boards = [logits[0] for logits in model.trajectory(puzzle[None], 24)]
iterations = (1, 3, 6, 12, 24)
figure, grid = plt.subplots(1, len(iterations), figsize=(13, 3.1))
for axes, count in zip(grid, iterations):
    draw(axes, boards[count - 1])
    axes.set_title(f"after {count}", fontsize=10)
figure.suptitle(f"A puzzle with {int((puzzles[number] > 0).sum())} givens", y=1.05)

# %% [markdown]
# ## How many iterations?
#
# The share of right cells after each iteration, one line per board:

# %%
right = []
with torch.no_grad():
    for logits in model.trajectory(puzzles, 40):
        right.append((logits.argmax(-1) + 1 == solutions).double().mean(1))
plt.figure(figsize=(6, 3))
plt.plot(range(1, 41), 100 * torch.stack(right))
plt.xlabel("iteration")
plt.ylabel("right cells (%)")
plt.title("Eight boards")

# %% [markdown]
# `python examples/train_boards.py --evaluate list --weights sudoku-solver` prints a table by givens and
# iterations, and [the results](../models.md) compare the model with other solvers.
