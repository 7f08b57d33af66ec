"""`Note`: a warning that reports a decision of lam, not a problem."""


class Note(UserWarning):
    """A decision and its reason, in one line. The command line prints it as a note."""
