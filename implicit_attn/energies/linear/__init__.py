"""Linear attention among keys that do not depend on the state."""
