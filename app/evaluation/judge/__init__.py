"""How good are its answers: an LLM as judge, in the style of MT-bench."""
