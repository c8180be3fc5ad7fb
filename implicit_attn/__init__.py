"""Implicit attention: layers whose output is the fixed point of an energy descent or mean-field update.

The core names are imported here; all others are in the sub-packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder

__version__ = "0.2.0"


def _import_solvers() -> None:
    """Import ``solvers``, and raise ImportError if another module of that name shadows it.

    A file ``solvers.py`` next to a script precedes installed packages. It is not run, because it may import
    this package, which is not yet initialised, and Python would report a circular import.
    """
    if "solvers" not in sys.modules:
        spec = importlib.util.find_spec("solvers")
        folders = None if spec is None else spec.submodule_search_locations
        if spec is not None and folders is None:
            raise _hidden(spec.origin)
        try:
            importlib.import_module("solvers")
        except Exception as error:
            if folders is None or PathFinder.find_spec("solvers.core", folders) is not None:
                raise  # another cause, such as a missing torch
            raise _hidden(spec.origin if spec else None) from error
    _check_solvers(sys.modules["solvers"])


def _check_solvers(module: object) -> None:
    """Raise ImportError unless ``module`` is the package of this distribution."""
    if getattr(module, "DISTRIBUTION", None) != "implicit-attn":
        folder = next(iter(getattr(module, "__path__", [])), None)
        raise _hidden(getattr(module, "__file__", None) or folder or repr(module))


def _hidden(place: str | None) -> ImportError:
    return ImportError(
        f"implicit_attn needs its own package solvers, but `import solvers` found {place}. Rename "
        "that file or folder or remove its directory from sys.path, then start a new Python process"
    )


_import_solvers()
from implicit_attn import data as data
from implicit_attn import demo as demo
from implicit_attn import deq as deq
from implicit_attn import energies as energies
from implicit_attn import kernels as kernels
from implicit_attn import models as models
from implicit_attn import regularization as regularization
from implicit_attn import solvers as solvers
from implicit_attn import studies as studies
from implicit_attn import updates as updates
from implicit_attn import weights as weights
from implicit_attn.block import DEQTransformer as DEQTransformer
from implicit_attn.block import EquilibriumBlock as EquilibriumBlock
from implicit_attn.deq import DEQ as DEQ
from implicit_attn.deq import unroll as unroll
from implicit_attn.energies import BiSoftmaxAttention as BiSoftmaxAttention
from implicit_attn.energies import ConditionalAttention as ConditionalAttention
from implicit_attn.energies import DenseAssociative as DenseAssociative
from implicit_attn.energies import Energy as Energy
from implicit_attn.energies import FunctionEnergy as FunctionEnergy
from implicit_attn.energies import GatedFeedForward as GatedFeedForward
from implicit_attn.energies import GELUFeedForward as GELUFeedForward
from implicit_attn.energies import Hopfield as Hopfield
from implicit_attn.energies import LinearAttention as LinearAttention
from implicit_attn.energies import Quadratic as Quadratic
from implicit_attn.energies import ReLUFeedForward as ReLUFeedForward
from implicit_attn.energies import ScoreAttention as ScoreAttention
from implicit_attn.energies import SoftmaxAttention as SoftmaxAttention
from implicit_attn.energies import SoftmaxFeedForward as SoftmaxFeedForward
from implicit_attn.energies import check_energy as check_energy
from implicit_attn.kernels import bisoftmax as bisoftmax
from implicit_attn.kernels import explain as explain
from implicit_attn.models import BoardSolver as BoardSolver
from implicit_attn.models import EnergyTransformer as EnergyTransformer
from implicit_attn.models import HyperSET as HyperSET
from implicit_attn.models import ImageClassifier as ImageClassifier
from implicit_attn.models import LanguageModel as LanguageModel
from implicit_attn.models import PottsModel as PottsModel
from implicit_attn.models import SpinTransformer as SpinTransformer
from implicit_attn.regularization import VariationalDropout as VariationalDropout
from implicit_attn.regularization import apply_norm as apply_norm
from implicit_attn.updates import ActivationStep as ActivationStep
from implicit_attn.updates import AdaptiveTAPAttention as AdaptiveTAPAttention
from implicit_attn.updates import GradientStep as GradientStep
from implicit_attn.updates import KineticAttention as KineticAttention
from implicit_attn.updates import MeanFieldAttention as MeanFieldAttention
from implicit_attn.updates import Update as Update
from implicit_attn.weights import load_pretrained as load_pretrained
from implicit_attn.weights import pretrained_models as pretrained_models
from solvers.core.exports import define_all

define_all(vars())
