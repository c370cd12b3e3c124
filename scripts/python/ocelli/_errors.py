"""Errors of commands, by the status with which the program exits."""


class Error(RuntimeError):
    """A command has failed. The text is that of the program's error; `exit_code` is the status it would exit with."""

    exit_code = 1

    def __init__(self, message, exit_code=None):
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class CheckError(Error):
    """A check has failed, such as one of a device's results."""

    exit_code = 1


class ConfigurationError(Error):
    """A flag, the recipe or the work directory is invalid, a path does not exist, or the model is too large."""

    exit_code = 2


class DataError(Error):
    """A shard, a folder of images, weights or a checkpoint exists and cannot be used, or the disk has a defect."""

    exit_code = 3


class NotFiniteError(Error):
    """Loss or gradients were not finite too often, or features are not finite."""

    exit_code = 78


class BugError(Error):
    """The program has panicked: please report it."""

    exit_code = 101


class RankError(Error):
    """Another rank was lost or did not respond; the run can be started again."""

    exit_code = 134


_KINDS = {kind.exit_code: kind for kind in Error.__subclasses__()}


def error_of(exit_code, message):
    """Returns the error with this text for this status."""
    return _KINDS.get(exit_code, Error)(message, exit_code)
