"""The one base of all errors that are a user's to mend; `cli` prints their message alone and exits with `exit_code`."""


class HpcgenError(Exception):
    """A mistake of the user or of the site. The message names what is wrong and the remedy.

    Rooms raise their own subclasses, so that a caller can tell a bad model from a bad input.
    """

    exit_code = 2
