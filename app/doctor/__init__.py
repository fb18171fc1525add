"""Doctor: check this machine, and measure the bandwidth between ranks.

`facts` reads the machine, `imports` tries to import packages, `rows` turns both into findings;
`bandwidth` times collectives between ranks, and `costs` estimates what a training step sends.
`python -m app.doctor` runs it.
"""
