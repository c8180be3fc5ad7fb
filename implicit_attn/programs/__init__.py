"""Programs that train models, a dataclass of options each; ``implicit-attn train NAME`` runs them."""
