"""The base of Ray's errors."""


class RayError(Exception):
    pass
