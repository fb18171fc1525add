"""The parts of a run, each built from those before it: what the verbs share.

    Environment -> Base -> data module -> what `auto` is -> trainer, module -> what a run ends with

A verb imports these modules in its function, after what needs no torch; `finish` alone needs none.
"""
