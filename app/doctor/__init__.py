"""Doctor: what is wrong with this machine, and how fast its ranks talk.

`facts` reads the machine, `imports` tries the packages, `rows` judges them; `bandwidth` times
messages between ranks and `needs` says what a training's step sends of them. A package's own verb:
`python -m app.doctor`.
"""
