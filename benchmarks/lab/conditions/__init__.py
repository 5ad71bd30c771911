"""The conditions: how to train, what to do afterwards, and what each is for."""
