"""One process of a run and the ranks of a machine: launch, signals, errors, supervision."""
