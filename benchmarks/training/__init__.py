"""Training speed and memory compared with peers: same model and rows, similar tokens per step."""
