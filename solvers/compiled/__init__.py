"""Solves and adjoints by compiled programs."""
