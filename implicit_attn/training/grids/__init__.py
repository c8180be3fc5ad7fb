"""Training on instances that are drawn as they are needed."""
