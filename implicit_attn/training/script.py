"""A training run as the main part of a script: resumed or new, its ends told in one line."""

from __future__ import annotations

from implicit_attn.training.errors import Interrupted, NonFiniteLoss, SettingsDiffer
from implicit_attn.training.loop import Training


def run_script(training: Training, *, resume: bool) -> None:
    """Run a training to its end, or leave the script with a message.

    Args:
        training: built anew by the script.
        resume: continue from its checkpoint.

    Raises:
        SystemExit: 130 after Ctrl-C; a message where there is nothing to resume, where it was made
            with other settings, and where the loss, its gradient or a parameter was not finite.
    """
    first = training.fabric.global_rank == 0
    try:
        if resume:
            training.resume()
        elif first and training.path.exists():
            print(f"{training.path} of an earlier run will be replaced (--resume continues it)")
        training.run()
    except Interrupted as stop:
        if not first:  # a process that fails would have the first one killed
            raise SystemExit(0) from None
        print(f"{stop}: continue with --resume")
        raise SystemExit(130) from None
    except (FileNotFoundError, SettingsDiffer, NonFiniteLoss) as error:
        raise SystemExit(str(error) if first else 0) from None
