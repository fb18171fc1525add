"""Ship the small data, the tokenizer and the raw text that the offline default learns from."""
