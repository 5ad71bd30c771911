"""Parts of examples/real_model.py: the weights, the traces, the needles, the training run and the report."""
