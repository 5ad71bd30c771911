"""Fine-tuning: the data, real `SFTTrainer` runs, and the mechanisms that are not (yet) modes of the package."""
