"""The toy language: words, needles of several kinds, and chains of steps that look things up."""
