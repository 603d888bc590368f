"""How one step is carried out: strategies, precision, gradient state."""
