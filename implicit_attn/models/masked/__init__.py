"""Masked image modelling: hidden patches of an image predicted from the visible ones."""
