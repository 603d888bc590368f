"""Complete, runnable recipes: each a task, its data, a YAML file and the figures to expect."""
