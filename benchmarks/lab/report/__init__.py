"""Tables and plots, from the results only."""
