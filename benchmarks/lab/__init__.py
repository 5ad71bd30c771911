"""The lab: what each protection keeps of recall, and what it costs in reasoning, measured on small hybrids.

`python -m benchmarks.lab --help` says what it can do; docs/evidence/README.md is what came of it.
"""
