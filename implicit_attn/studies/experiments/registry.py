"""All experiments by the name of their sub-command."""

from __future__ import annotations

from implicit_attn.studies.experiments.bare import commands as bare
from implicit_attn.studies.experiments.boards import commands as boards
from implicit_attn.studies.experiments.experiment import Experiment
from implicit_attn.studies.experiments.harder import commands as harder
from implicit_attn.studies.experiments.kinetic import commands as kinetic
from implicit_attn.studies.experiments.landscapes import commands as landscapes
from implicit_attn.studies.experiments.memories import commands as memories
from implicit_attn.studies.experiments.optimisers import commands as optimisers
from implicit_attn.studies.experiments.potts import commands as potts
from implicit_attn.studies.experiments.theories import commands as theories

WINGS = (theories, potts, boards, bare, memories, landscapes, kinetic, optimisers, harder)
EXPERIMENTS: dict[str, Experiment] = {
    name: experiment for wing in WINGS for name, experiment in wing.EXPERIMENTS.items()
}
