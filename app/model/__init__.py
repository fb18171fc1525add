"""What is trained: base, tokenizer, attention, recompute, adapter."""
