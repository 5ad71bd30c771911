"""Running the experiment: seeds, results on disk, and the loop over runs that are still missing."""
