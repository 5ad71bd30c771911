"""A demonstration of attention amnesia, and of what guards against it, in minutes on a CPU.

`routeguard.demo.run.run_demo` fine-tunes a tiny pretrained hybrid model with TRL's `SFTTrainer`, with and without a
guard, and measures recall and reasoning after each run. `python -m routeguard.demo` shows it as a table and a plot.
"""
