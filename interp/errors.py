"""The one error that interp raises on purpose."""


class InterpError(Exception):
    """Something the user can act on: what happened, what was expected, what to do.

    The message is one or two plain sentences. The command line prints it without a traceback.
    """


class UsageError(InterpError):
    """An option that does not exist or is out of range: exit status 2 on the command line."""
