"""The model: base, tokenizer, attention, activation recompute, quantization and adapter."""
