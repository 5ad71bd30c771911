"""Tiny random models of every transformers decoder family; see `build`."""
