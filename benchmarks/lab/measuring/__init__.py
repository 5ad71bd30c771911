"""Scores of a model: recall by kind and length, reasoning, drift."""
