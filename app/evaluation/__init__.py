"""Did it learn: losses, metrics of answers, tasks and a judge, base vs tuned."""
