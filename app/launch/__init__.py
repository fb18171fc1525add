"""Start a run on a cluster: its job file from the settings of the run, submitted and watched."""
