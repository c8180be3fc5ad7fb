"""The sub-commands about landscapes."""

from __future__ import annotations

import argparse
from functools import partial

import torch

from implicit_attn.command_line import seed_number, share, whole
from implicit_attn.studies.experiments.experiment import Advance, Experiment
from implicit_attn.studies.experiments.landscapes.descents import landscapes, moved_states
from implicit_attn.studies.experiments.landscapes.figures import landscapes_figure, norms_figure
from implicit_attn.studies.experiments.landscapes.norms import spaced_dimensions, step_norms
from implicit_attn.studies.experiments.landscapes.spin_figures import spin_figure
from implicit_attn.studies.experiments.landscapes.spins import (
    bessel_table,
    directed_couplings,
    norm_curves,
    planar_spins,
    strongest,
)
from implicit_attn.studies.tables import Result, Table

ORDERS = tuple(2**power for power in range(10))
USUAL = (2, 16, 64, 128, 256, 512, 1024)  # dimensions that are printed at the usual scale c = 1
BETAS = (0.1, 0.5, 1.0, 2.0, 10.0)


def run_landscapes(options: argparse.Namespace, advance: Advance) -> Result:
    """attention steps as descent of queries on seven landscapes of their energy, in two dimensions"""
    found = landscapes(
        states=options.states,
        patterns=options.patterns,
        points=options.points,
        seed=options.seed,
        advance=advance,
    )
    summary: Table = [each.summary() for each in found]
    tables = {"pictures": summary, "states": moved_states(found)}
    return Result(tables, ("pictures",), partial(landscapes_figure, found=found))


def run_norm_map(options: argparse.Namespace, advance: Advance) -> Result:
    """how far one step of bare self-attention moves random tokens: dimension x scale"""
    dimensions = spaced_dimensions(options.dimensions)
    scales = torch.linspace(0.2, 2, options.scales, dtype=torch.float64).tolist()
    table = step_norms(
        dimensions,
        scales,
        tokens=options.tokens,
        draws=options.draws,
        seed=options.seed,
        advance=advance,
    )
    usual = step_norms(
        USUAL, [1.0], tokens=options.tokens, draws=options.draws, seed=options.seed, advance=advance
    )
    return Result(
        {"norms": table, "usual": usual},
        ("usual",),
        partial(norms_figure, table=table),
        f"; {options.tokens} tokens, {options.draws} draws",
    )


def run_spin_pictures(options: argparse.Namespace, advance: Advance) -> Result:
    """small pictures of spins: Bessel ratios, lengths of means, a coupling graph, a few spins"""
    advance("Bessel ratios")
    ratios = bessel_table(ORDERS)
    advance("lengths of means")
    norms = norm_curves(BETAS, dim=options.dim)
    advance("couplings")
    edges = strongest(directed_couplings(options.sites, seed=options.seed), options.share)
    picture = planar_spins(options.spins, strength=2.0, seed=options.seed)
    pairs = strongest(picture.couplings, 0.5)
    spins = [{"spin": i, "x": x, "y": y} for i, (x, y) in enumerate(picture.means.tolist())]
    draw = partial(
        spin_figure,
        ratios=ratios,
        norms=norms,
        edges=edges,
        sites=options.sites,
        share=options.share,
        picture=picture,
        pairs=pairs,
        dim=options.dim,
    )
    tables = {"ratios": ratios, "norms": norms, "edges": edges, "spins": spins}
    return Result(tables, ("ratios",), draw)


EXPERIMENTS = {
    "landscapes": Experiment(
        run_landscapes,
        "Attention as descent: queries on the landscape of their energy",
        (
            ("--states", whole(1, 1000), 16, "queries, drawn from N(0, I)"),
            ("--patterns", whole(1, 1000), 32, "stored patterns, drawn from N(0, I)"),
            ("--points", whole(2, 500), 81, "of the grid of the background, on each axis"),
            ("--seed", seed_number, 2, "of the draws"),
        ),
        quick=("--states", "4", "--patterns", "6", "--points", "9"),
    ),
    "norm-map": Experiment(
        run_norm_map,
        "Bare self-attention: the norm of one step on random tokens",
        (
            ("--dimensions", whole(2, 1000), 40, "values of d between 2 and 1024"),
            ("--scales", whole(2, 1000), 19, "values of c between 0.2 and 2"),
            ("--tokens", whole(2, 1000), 32, "tokens of a draw"),
            ("--draws", whole(1, 1000), 50, "independent draws at each point"),
            ("--seed", seed_number, 0, "of the draws"),
        ),
        quick=("--dimensions", "3", "--scales", "3", "--draws", "2"),
    ),
    "spin-pictures": Experiment(
        run_spin_pictures,
        "Spins of fixed length: their mean in a field, and their couplings",
        (
            ("--dim", whole(3, 100_000), 512, "dimension d of the spins whose mean is drawn"),
            ("--sites", whole(2, 500), 64, "sites of the directed graph"),
            ("--share", share, 0.03, "of its couplings that are drawn, the strongest"),
            ("--spins", whole(2, 50), 7, "planar spins of the last panel"),
            ("--seed", seed_number, 0, "of the couplings and fields"),
        ),
        quick=("--dim", "8", "--sites", "6", "--share", "0.5"),
    ),
}
