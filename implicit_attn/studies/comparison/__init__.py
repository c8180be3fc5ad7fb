"""A trained equilibrium beside simpler models, and what the equilibrium tells besides the class."""
