"""Errors that are not the program's fault."""


class DataError(ValueError):
    """Files of a data set are missing, broken or not what they should be. The tools end with its message alone."""
