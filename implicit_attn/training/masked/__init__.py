"""The task of masked image modelling, and what its models have to beat."""
