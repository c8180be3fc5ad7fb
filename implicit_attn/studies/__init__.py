"""Studies of a trained layer, each one call that returns tables and plots them.

``convergence``, ``extrapolation``, ``paths`` and ``geometry`` take a ``DEQ`` with its input, a model that
calls one, or a name of shipped weights. ``examples/studies.py`` runs them.
"""

from __future__ import annotations

from implicit_attn.studies.converging import Convergence as Convergence
from implicit_attn.studies.converging import Curve as Curve
from implicit_attn.studies.converging import convergence as convergence
from implicit_attn.studies.converging import jacobian_eigenvalues as jacobian_eigenvalues
from implicit_attn.studies.converging import solver_choices as solver_choices
from implicit_attn.studies.enumeration import SpinModel as SpinModel
from implicit_attn.studies.enumeration import exact_moments as exact_moments
from implicit_attn.studies.enumeration import random_ising as random_ising
from implicit_attn.studies.enumeration import random_potts as random_potts
from implicit_attn.studies.extrapolating import Extrapolation as Extrapolation
from implicit_attn.studies.extrapolating import accuracy_by_iterations as accuracy_by_iterations
from implicit_attn.studies.extrapolating import extrapolation as extrapolation
from implicit_attn.studies.states import Geometry as Geometry
from implicit_attn.studies.states import Paths as Paths
from implicit_attn.studies.states import average_angle as average_angle
from implicit_attn.studies.states import effective_rank as effective_rank
from implicit_attn.studies.states import geometry as geometry
from implicit_attn.studies.states import paths as paths
from implicit_attn.studies.study import Subject as Subject
from implicit_attn.studies.study import format_table as format_table
from implicit_attn.studies.study import open_subject as open_subject
from implicit_attn.studies.study import write_table as write_table
from solvers.core.exports import define_all

define_all(vars())
