"""Builds the parts of a run for the verbs, each from the parts before it.

    Environment -> Base -> data module -> resolved `auto` settings -> trainer, module -> finish

A verb imports these modules inside its function, after the checks that need no torch; only `finish`
can be imported without torch.
"""
