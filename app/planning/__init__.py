"""Will it fit, how fast, and what to change: by arithmetic, without weights, a GPU or a network."""
