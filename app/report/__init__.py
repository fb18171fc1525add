"""HTML pages of runs, previews, plans, sweeps and judges, and model cards."""
