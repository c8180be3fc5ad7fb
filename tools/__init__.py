"""Tools for those who work on the repository; no part of the package."""
