"""Training speed and memory beside peers: the same model and rows, about as many tokens a step."""
