"""Every solver on a trained layer: residual, energy, evaluations, time, eigenvalues of its Jacobian.

    python examples/study_convergence.py                          # an equilibrium that reads digits
    python examples/study_convergence.py --weights mnist-spins

--weights takes names of shipped weights and files that train_images.py writes. For a layer of your own call
implicit_attn.studies.convergence.
"""

from runner import Result, open_subject, run

from implicit_attn import studies


def study_convergence(
    weights: str = "digits-hyperset-equilibrium",  # a file, or a name of shipped weights
    samples: int = 64,  # test samples
    rtol: float | None = None,  # tolerance of the costs (default: of the training)
    max_steps: int = 100,  # evaluations per sample
    spectra: int = 2,  # samples whose Jacobian is studied
) -> Result:
    subject = open_subject(weights, samples)
    found = studies.convergence(subject, rtol=rtol, max_steps=max_steps, spectra=spectra)
    return found.tables, found.plot(f"{subject.title}\n{samples} test samples")


if __name__ == "__main__":
    run(study_convergence)
