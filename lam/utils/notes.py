"""`Note`: a warning about a decision that lam made, when nothing is wrong."""


class Note(UserWarning):
    """A decision and its reason, in one line. The command line prints it as a note."""
