"""What a guard would do in an environment, to a model, under a training config: found out without training."""
