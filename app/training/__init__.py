"""How a step goes and is kept: module, loss, optimizer, trainer, checkpoint, logger, callbacks."""
