"""The one error that interp raises on purpose."""


class InterpError(Exception):
    """Something the user can act on: what happened, what was expected, what to do.

    The message is one or two plain sentences. The command line prints it without a traceback.
    """


class UsageError(InterpError):
    """An option that does not exist or is out of range: exit status 2 on the command line."""


class CheckError(InterpError):
    """A model that loads, and does not do what interp rests on.

    Attributes:
        check: the check of `interp doctor` that it failed.
    """

    def __init__(self, message: str, check: str) -> None:
        super().__init__(message)
        self.check = check
