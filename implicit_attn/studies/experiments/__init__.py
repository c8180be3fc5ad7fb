"""Experiments that need no trained model: a sub-command, a figure and CSV tables each."""
