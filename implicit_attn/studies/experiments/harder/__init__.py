"""Easy to hard on a generated task: an equilibrium beside models of fixed depth."""
