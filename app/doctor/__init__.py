"""Doctor: check this machine, and measure the bandwidth between ranks.

`facts` reads the machine, `rows` turns that into findings; `bandwidth` times collectives between
ranks, and estimates what a training step sends. `python -m app.doctor` runs it.
"""
