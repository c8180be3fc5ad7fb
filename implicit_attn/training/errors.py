"""The ends of a training run that are not its last epoch."""

from __future__ import annotations


class Interrupted(Exception):
    """Ctrl-C: the batch was finished and everything saved."""


class SettingsDiffer(ValueError):
    """A checkpoint was made by a run with other settings."""


class NonFiniteLoss(ArithmeticError):
    """The loss, its gradient or a parameter is NaN or infinite.

    For a loss or a gradient the state before that batch was saved; with a parameter that is not
    finite nothing was, and the checkpoint is the last one without.
    """
