"""What a GPU would be asked for, counted on a machine without one.

`device` makes torch believe in a CUDA device, on which FakeTensors live; `ours` builds a run on it
by the rooms of `app.train`; `counting` sees every operator; `trace` brings it to numbers.
"""
