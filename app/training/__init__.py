"""How a step goes: module, loss, optimizer, schedule, trainer, checkpoints, loggers, callbacks."""
