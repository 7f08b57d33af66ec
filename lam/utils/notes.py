"""`Note`: warnings that tell a decision of lam where nothing is wrong."""


class Note(UserWarning):
    """A decision and its reason, in one line. The command line prints it as a note."""
