"""Turns of a solve in which nothing is out of the ordinary: the loop takes them with fewer calls."""
