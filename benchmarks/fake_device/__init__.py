"""The work that a GPU would be given, counted on a machine without one.

`device` registers a fake CUDA device for FakeTensors; `ours` builds a run on it with the parts of
`app.train`; `counting` intercepts every operator; `trace` turns them into counts.
"""
