"""Evaluation of base vs tuned model: losses, metrics of answers, tasks, and an LLM judge."""
