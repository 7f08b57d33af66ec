"""`Note`: the category of warnings that say what lam decided by itself, where nothing is wrong."""


class Note(UserWarning):
    """A decision and its reason, in one line. The command line prints it as a note."""
