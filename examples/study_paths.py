"""Where a trained layer ends from its input, from zero and from random starts: distances and predictions.

    python examples/study_paths.py                              # an equilibrium that reads digits
    python examples/study_paths.py --weights digits-hyperset    # a recurrence, which depends on its start

For a layer of your own call implicit_attn.studies.paths.
"""

from runner import Result, open_subject, run

from implicit_attn import studies


def study_paths(
    weights: str = "digits-hyperset-equilibrium",  # a file, or a name of shipped weights
    samples: int = 128,  # test samples, at most
    starts: int = 2,  # random starts
) -> Result:
    subject = open_subject(weights, samples)
    found = studies.paths(subject, starts=starts)
    return found.tables, found.plot(f"{subject.title}\n{len(subject.inputs)} test samples")


if __name__ == "__main__":
    run(study_paths)
