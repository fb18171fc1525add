"""What a person looks at: pages of runs, previews, plans and sweeps, and model cards."""
