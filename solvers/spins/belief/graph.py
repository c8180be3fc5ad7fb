"""Pairs of coupled sites as directed edges: from couplings of all pairs, or from a list of pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Graph:
    """The 2E directed edges of E pairs, sorted by the site that they point to.

    Along each of them runs a message ``source -> target``, which weighs the states of the target.

    Attributes:
        sites: N.
        source, target: (2E,) sites.
        reverse: (2E,) the edge in the other direction.
        forward: (2E,) bool, True where ``target`` is the first site of the pair, of an unlisted one
            the lower. The edges where it holds are the pairs, each once.
        place: (2E,) of its message among the packed ones, see :meth:`packed`.
        listed: the pairs came as a list.
        degree: of every site where all are alike, else None.
    """

    sites: int
    source: Tensor
    target: Tensor
    reverse: Tensor
    forward: Tensor
    place: Tensor
    listed: bool
    degree: int | None

    @classmethod
    def of_matrix(cls, coupled: Tensor) -> Graph:
        """The pairs where ``coupled`` (N, N) bool, symmetric, is True."""
        pairs = torch.nonzero(coupled.triu(1))
        return cls._of(pairs, len(coupled), listed=False)

    @classmethod
    def of_list(cls, edges: Tensor, sites: int) -> Graph:
        """The pairs ``edges`` (E, 2)."""
        return cls._of(edges, sites, listed=True)

    @classmethod
    def _of(cls, edges: Tensor, sites: int, listed: bool) -> Graph:
        number = len(edges)
        target, source = edges.mT.reshape(-1), edges.flip(1).mT.reshape(-1)
        own = torch.arange(number, device=edges.device)
        place = torch.cat([2 * own, 2 * own + 1]) if listed else target * sites + source
        order = torch.argsort(target * sites + source)
        moved = torch.argsort(order)  # where an edge has gone
        degrees = torch.bincount(target, minlength=sites)
        alike = number > 0 and bool((degrees == degrees[0]).all())
        return cls(
            sites,
            source[order],
            target[order],
            moved.roll(number)[order],  # the two halves are each other's reverse
            order < number,
            place[order],
            listed,
            int(degrees[0]) if alike else None,
        )

    @property
    def number(self) -> int:
        """2E."""
        return len(self.source)

    def blocks(self, couplings: Tensor) -> Tensor:
        """``J`` (2E, d, d) of every edge, rows for the target and columns for the source.

        ``couplings`` are (N, N, d, d), or (E, d, d) of listed pairs with rows for the first site.
        """
        if not self.listed:
            return couplings.flatten(0, 1)[self.place]
        found = couplings[self.place // 2]
        return torch.where(self.forward[:, None, None], found, found.mT)

    def gather(self, messages: Tensor) -> Tensor:
        """Sums (B, N, d) over the messages (B, 2E, d) into every site."""
        batch, _, states = messages.shape
        if self.degree is not None:
            return messages.reshape(batch, self.sites, self.degree, states).sum(2)
        sums = messages.new_zeros(batch, self.sites, states)
        return sums.index_add(1, self.target, messages)

    def cavities(self, total: Tensor, messages: Tensor) -> Tensor:
        """Of every edge, ``total`` (B, N, d) at its source less what came back from its target."""
        return total.index_select(1, self.source) - messages.index_select(1, self.reverse)

    def packed_shape(self, batch: int, states: int) -> tuple[int, ...]:
        """(B, N, N, d), or (B, E, 2, d) of listed pairs."""
        first = (self.number // 2, 2) if self.listed else (self.sites, self.sites)
        return (batch, *first, states)

    def packed(self, messages: Tensor) -> Tensor:
        """Messages (B, 2E, d) as users see them, of :meth:`packed_shape`.

        ``[i, j]`` is the message from j into i, ``[e, k]`` the one into the site ``edges[e, k]``.
        """
        batch, _, states = messages.shape
        shape = self.packed_shape(batch, states)
        whole = messages.new_zeros(batch, shape[1] * shape[2], states)
        return whole.index_copy(1, self.place, messages).view(shape)

    def unpacked(self, messages: Tensor) -> Tensor:
        """The inverse of :meth:`packed`."""
        return messages.flatten(1, 2).index_select(1, self.place)
