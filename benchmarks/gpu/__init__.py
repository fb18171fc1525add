"""Fine-tuning an 8B model on one GPU: speed, memory, where the time goes; beside a plain loop."""
