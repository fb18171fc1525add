"""Grading of answers by an LLM judge, in the style of MT-bench."""
