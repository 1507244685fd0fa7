"""What a user can put right."""


class UserError(Exception):
    """A mistake in what was asked for; the message says what to do, and is shown without a traceback."""
