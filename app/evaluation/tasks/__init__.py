"""Tasks: what published benchmarks ask, from local files, and what a model makes of it.

`settings` and `questions` need no torch: rows become questions, and what is wrong with them is
said. `measure` asks a model, `code` runs what it has programmed, `harness` is the one door to
lm-evaluation-harness.
"""
