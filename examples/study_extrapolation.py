"""A trained model with other numbers of iterations than in training: accuracy, loss, residual, energy.

    python examples/study_extrapolation.py                            # an equilibrium that reads digits
    python examples/study_extrapolation.py --weights mnist-hyperset   # a recurrence, iterated further

Equilibria are solved by forward iteration and by accelerated solvers, all charged by evaluations. For a layer
of your own call implicit_attn.studies.extrapolation.
"""

from runner import Result, open_subject, run

from implicit_attn import studies


def study_extrapolation(
    weights: str = "digits-hyperset-equilibrium",  # a file, or a name of shipped weights
    samples: int = 1000,  # test samples, at most
    factor: int = 4,  # up to so many times the iterations of training
) -> Result:
    subject = open_subject(weights, samples)
    found = studies.extrapolation(subject, factor=factor)
    return found.tables, found.plot(f"{subject.title}\n{len(subject.inputs)} test samples")


if __name__ == "__main__":
    run(study_extrapolation)
