"""The update of a board solver: cells and groups tell each other, colour by colour, what is left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from implicit_attn.updates import Update
from solvers.core.checks import require_count

MARKS = 3  # of a cell and a colour: given, another one is given, nothing is given


class BoardUpdate(Update):
    r"""One exchange between the cells of a board and its groups, the same for all cells and colours.

    The state has features ``h_ia`` in (-1, 1) for every cell i and colour a. With the members G of a
    group, the groups G(i) of a cell, q colours, n = |G| and the embedded marks ``e_ia = V x_ia + b``::

        c_i  = W_c relu(U_c sum_a h_ia / sqrt(q))                        of a cell, over its colours
        g_Ga = W_g relu(U_g sum_{i in G} h_ia / sqrt(n))                 of a group, for one colour
        y_ia = O relu(A h_ia + e_ia + c_i + sum_{G in G(i)} g_Ga)        two vectors, r and s
        h_ia <- h_ia + sigmoid(s_ia) (tanh(r_ia) - h_ia)

    No weight knows a cell, a group or a colour. The map therefore commutes with every permutation of
    the colours and with every permutation of the cells that maps groups to groups.

    Args:
        groups: cells of each group, integers in 0 .. cells - 1.
        cells: N.
        colours: q.
        features: m of a cell and colour.
        width: hidden units M.

    Shapes: state (B, N, q, m); input x, the marks (B, N, q, 3), or what :meth:`prepare` made of it,
    (B, N, q, M). The initial state is zero.

    Raises:
        TypeError, ValueError: no group, a cell that is not there or twice in a group, or a number that
            is below 1; the width must not be 3, the number of marks.

    Source: message passing between variables and constraints with shared weights, as in Selsam et al.,
    "Learning a SAT solver from single-bit supervision" (2019), https://arxiv.org/abs/1802.03685, and
    Palm, Paquet, Winther, "Recurrent relational networks" (2018), https://arxiv.org/abs/1711.08028.
    """

    members: Tensor

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        cells: int,
        colours: int,
        features: int = 24,
        width: int = 48,
    ) -> None:
        super().__init__()
        self.cells, self.colours = require_count("cells", cells), require_count("colours", colours)
        self.features, self.width = (
            require_count("features", features),
            require_count("width", width),
        )
        if width == MARKS:
            raise ValueError(f"width must not be {MARKS}, the number of marks, got {width}")
        # Not in the state dict: the groups are arguments, as the sizes are.
        self.register_buffer("members", _incidence(groups, self.cells), persistent=False)
        self.embedding = nn.Linear(MARKS, width)
        self.own = nn.Linear(features, width, bias=False)
        self.to_cell, self.to_group = nn.Linear(features, width), nn.Linear(features, width)
        self.from_cell = nn.Linear(width, width, bias=False)
        self.from_group = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, 2 * features)

    def prepare(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The embedded marks e (B, N, q, M)."""
        return self.embedding(x)

    context = prepare  # with ``advance``: what ``compile_step`` of the training looks for

    def initial(self, x: Tensor) -> Tensor:
        """Zeros (B, N, q, m)."""
        return x.new_zeros(*x.shape[:-1], self.features)

    def start(self, x: Tensor, prepared: Tensor) -> Tensor:
        return self.initial(prepared)

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        """The state (B, N, q, m) after one exchange.

        Raises:
            ValueError: without ``x``, and with a mask: what is not given is said by the marks.
        """
        if x is None:
            raise ValueError("x must be the marks (B, N, q, 3), got None")
        if mask is not None:
            raise ValueError("mask must be None: the marks say which cells are given")
        return self.advance(z, self.prepare(x) if x.shape[-1] == MARKS else x)

    def advance(self, z: Tensor, prepared: Tensor) -> Tensor:
        """The same, of the embedded marks (B, N, q, M)."""
        batch = z.shape[0]
        cells = self.to_cell(z.sum(2) * self.colours**-0.5)
        scaled = self.members * self.members.sum(1, keepdim=True).rsqrt()
        sums = torch.matmul(scaled, z.flatten(2)).view(
            batch, len(scaled), self.colours, self.features
        )
        groups = self.from_group(torch.relu(self.to_group(sums))).flatten(2)
        back = torch.matmul(self.members.mT, groups).view(prepared.shape)
        cells = self.from_cell(torch.relu(cells)).unsqueeze(2)
        found = self.output(torch.relu(self.own(z) + prepared + cells + back))
        target, gate = found.split(self.features, -1)
        return torch.lerp(z, torch.tanh(target), torch.sigmoid(gate))

    def extra_repr(self) -> str:
        return f"cells={self.cells}, colours={self.colours}, groups={len(self.members)}"


def _incidence(groups: Sequence[Sequence[int]], cells: int) -> Tensor:
    """(groups, cells), 1 where a cell is in a group."""
    if len(groups) == 0:
        raise ValueError("groups must hold at least one group, got none")
    incidence = torch.zeros(len(groups), cells)
    for row, group in zip(incidence, groups, strict=True):
        if isinstance(group, (int, str)):
            raise TypeError(f"groups must hold sequences of cells, got {group!r}")
        members = [require_count("a cell of groups", cell, low=0) for cell in group]
        if len(members) == 0 or max(members) >= cells or len(set(members)) < len(members):
            raise ValueError(
                f"groups must hold different cells in 0 .. {cells - 1} each, got {list(group)}"
            )
        row[members] = 1
    return incidence
