"""Energy landscapes of attention: what a step does to queries and tokens."""
