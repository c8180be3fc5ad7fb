"""Easy to hard: how many instances a model solves with more or fewer iterations than in training."""
