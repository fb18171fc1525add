"""Tasks: published benchmarks and custom tasks, read from local files.

`forms` and `questions` turn rows into questions and report invalid ones, without torch. `measure`
runs a model on the questions and scores it, and runs tasks of lm-evaluation-harness.
"""
