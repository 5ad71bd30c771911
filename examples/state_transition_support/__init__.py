"""What the two state-transition examples share: baselines, costs, and plots."""
