"""What users may import, name by name: nothing is lost, and nothing is added without being said.

A name that leaves this list breaks somebody's program; a new public name is added here.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Packages whose __all__ is exactly this, and modules that the documents name.
PUBLIC = {
    "solvers": """
        AdaptiveTAP Adjoint AdjointReport Anderson Beliefs Broyden CG Decimation Descent
        EnergyUpdate Forward GMRES GaussianSite GlauberRun GradientDescent Implicit IsingSite LBFGS
        LinearSolver MINRES Newton OneStep Phantom PottsSite Progress SaddleSolution Site Solution
        SolveError SolveWarning Solver Spectrum SpectrumError SphericalSite SpinMarginals SpinState
        Status Tolerance TorusSite Trace Unrolled adaptive_tap belief_propagation decimate
        extreme_eigenvalues fixed_point gibbs glauber jacobian jacobian_penalty kinetic_map
        kinetic_step kinetic_trajectory solve_linear spectral_radius spectrum spherical_saddle starting_state
        steady_state tap_log_partition tap_step
    """,
    "solvers.torchdeq_bridge": """
        OPTIONS TorchDEQ register
    """,
    "implicit_attn": """
        ActivationStep DEQ Energy EnergyAttention EquilibriumBlock GradientStep Update __version__
        compile_layers load_pretrained pretrained_models
    """,
    "implicit_attn.deq": """
        DEQ EVALUATION_OPTIONS OPTIONS UnrolledLayer WarmStarts bake compile_layers unroll
    """,
    "implicit_attn.regularization": """
        SpectralNorm SpectralRadii VariationalDropout WeightNorm apply_norm correction_weights
        dropout_seeds fixed_point_correction remove_norm
    """,
    "implicit_attn.kernels": """
        Choice bisoftmax bisoftmax_hvp check_backend check_frozen_key_backend
        check_sigmoid_backend covariance_product explain explain_frozen_keys explain_sigmoid
        frozen_key_attention helmholtz_free_energy running_products running_states running_sums
        sigmoid_attention sigmoid_attention_hvp
    """,
    "implicit_attn.energies": """
        AttentionInput BareAttention BiSoftmaxAttention ClassicalHopfield ConditionalAttention
        ConditionalMixture Couplings DenseAssociative EffectiveRBM Energy EnergyReport EquilibriumEnergy Field
        FunctionEnergy GELUFeedForward GatedFeedForward GatedLinearAttention HeadwiseEnergy
        HiddenPrior Hopfield HyperSETEnergy
        IdentityLagrangian IsingLagrangian Lagrangian LayerNormLagrangian
        LearnedLayerNormLagrangian LinearAttention
        Prepared Projection Quadratic QueryEnergy RMSNorm RMSNormLagrangian ReLUFeedForward ReLULagrangian
        RowSoftmaxAttention Scaled ScoreAttention Select SigmoidAttention Site SiteDistribution SiteLagrangian
        SoftmaxAttention SoftmaxFeedForward SoftmaxLagrangian SpectralBound SphericalLagrangian
        SpinInteraction Sum VectorSpin Weighted check_energy
    """,
    "implicit_attn.energies.effective": """
        BinaryPrior ConstantPrior EffectiveRBM ExponentialPrior HiddenPrior IsingPrior LaplacePrior
        NormalPrior OneHotPrior PRIORS PoissonPrior ScalarPrior
    """,
    "implicit_attn.updates": """
        ActivationStep AdaptiveTAPAttention AttentionStep BareAttentionStep ConditionedStepSizes
        Couplings DescentStep FunctionUpdate GradientStep HyperSETLayer HyperSETStep
        KineticAttention LowRankDeltas MeanFieldAttention MixerAttention MomentumStep OnsagerNetwork
        PlainStepSizes QueryDescent SaddleAttention SoftmaxCouplingAttention StepSize StepSizes
        TokenMixer Update
    """,
    "implicit_attn.models": """
        ATTENTION_FORMS AttentionForm BACKBONES BinaryMemory BoardSolver BoardStatus BoardUpdate
        CRATE CausalAttention CausalBlock ConditionalModel EnergyAttention EnergyTransformer
        EquilibriumLanguageModel EquilibriumRing EquilibriumTransformer FactoredAttention HyperSET
        HyperSETEquilibrium ImageClassifier LanguageModel LayeredRing LightNewtonAttention
        MaskedCodes MaskedImageModel MaskedTransformer NewtonAttention PatchClassifier PottsModel
        PseudoLikelihoodFit QueryTrajectory RecurrentBackbone RecurrentLayer SharedTransformer
        SpinClassifier SpinTransformer SudokuAnswer SudokuModel SudokuPotts Trajectory ViT
        build_attention_form build_backbone build_model build_official fit_patterns
        fit_pseudolikelihood generate learn_groups load_model load_official random_symmetries
        sudoku_pairs to_official
    """,
    "implicit_attn.models.official": """
        MaskedCodes OfficialLayout PUBLISHED Published build_official load_official to_official
    """,
    "implicit_attn.models.memories": """
        BinaryMemory Fit fit_patterns
    """,
    "implicit_attn.data": """
        CircleTokens Compose HELP ImageData Instances LOADERS RandomAffine RandomCrop RandomFlip SudokuData
        SudokuSymmetries TextData batches board_counts draw_rings epoch_generator load load_cifar10
        load_digits load_fashion_mnist load_mnist load_sudoku load_text ngram_loss
        principal_features random_features read_idx read_list resolve_source reveal solve_sudoku
        some_samples stratified_holdout unique_puzzles
    """,
    "implicit_attn.training": """
        ACCELERATORS Augment BoardCompletion BoltzmannFit Classification CsvLog Interrupted
        LocallyTrained Log MaskedImages MaskedTokens NextToken NonFiniteLoss NotClaimed PRECISIONS
        Recipe SettingsDiffer
        SudokuCompletion Task TensorBoardLog Training accuracy compile_step contrastive_divergence
        describe exact_likelihood fit_exact_likelihood fit_locally median_of_counts run_script
        start_processes train_on_drawn
    """,
    "implicit_attn.studies": """
        Extrapolation HeldStep SpinModel Subject accuracy_by_evaluations accuracy_by_iterations
        adaptive_stopping average_angle effective_rank error_against_coupling
        evaluations_to_reach exact_moments extrapolate format_table geometry graph_potts
        jacobian_eigenvalues layers_of_depth log_partition_errors open_subject path_independence
        paths_of_layer paths_of_recurrence random_ising random_potts read_trade_off returned_within run_from
        solve_history solver_choices solver_costs solver_curves stopping_times train_trade_off
        write_report write_table
    """,
    "implicit_attn.checkpoint": """
        load_checkpoint read_progress restore_constants save_checkpoint
    """,
    "implicit_attn.weights": """
        Pretrained find_pretrained load_pretrained pretrained_models weights_file weights_path
    """,
    "implicit_attn.programs": """
        classify language_model masked_images mnist_spins solve_sudoku sudoku systems vit_images
    """,
    "implicit_attn.programs.systems": """
        bare_attention easy_to_hard hopfield_density potts_recovery sudoku_potts tap_vs_exact
    """,
    "implicit_attn.console": """
        completion demo info study weights
    """,
    "implicit_attn.kernels.workspace": """
        release
    """,
    "implicit_attn.studies.plots": """
        training_report
    """,
    "implicit_attn.studies.plots_spins": """
        mean_field_report spin_report
    """,
}
WITHOUT_ALL = {
    "solvers.torchdeq_bridge",
    "implicit_attn.kernels.workspace",
}


def modules() -> list[str]:
    paths = [path for name in ("solvers", "implicit_attn") for path in (ROOT / name).rglob("*.py")]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in sorted(paths)]
    names = [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]
    return [name for name in names if not name.endswith("__main__")]


@pytest.mark.parametrize("path", PUBLIC)
def test_the_public_names_are_there(path: str) -> None:
    module, names = importlib.import_module(path), PUBLIC[path].split()
    missing = [name for name in names if not hasattr(module, name)]
    assert missing == []
    if path not in WITHOUT_ALL:
        assert sorted(module.__all__) == sorted(names)


@pytest.mark.parametrize("name", modules())
def test_a_module_is_found_under_its_name(name: str) -> None:
    """``import package.module as m`` gives the module, not a function of the same name."""
    if ".triton." in name and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    scope: dict[str, object] = {}
    exec(f"import {name} as found", scope)
    found = scope["found"]
    assert isinstance(found, ModuleType)
    assert found.__name__ == name
