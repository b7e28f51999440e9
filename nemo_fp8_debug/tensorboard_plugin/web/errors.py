"""What a request can be refused for; the status of the answer says whose fault it is."""

from __future__ import annotations


class Refused(Exception):
    """A request that is not answered; its text says what was wrong, with what, and what to do."""

    status = 400


class BadParameter(Refused):
    """A parameter is missing, unknown, repeated or out of bounds."""


class Foreign(Refused):
    """The request comes from another site."""

    status = 403


class NotThere(Refused):
    """There is no such run, tensor or step."""

    status = 404


class NotReadable(Refused):
    """The record is there and cannot be read."""

    status = 409
