"""Why recall falls: attention distance, gradient and data locality, routing pictures, layer importance, drift plots."""
