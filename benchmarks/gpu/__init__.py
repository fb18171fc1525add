"""Fine-tuning an 8B model on one GPU: speed, memory, time by part; compared with a plain loop."""
