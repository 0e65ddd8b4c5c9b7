"""Errors a user can act on. Each message names the field or file, its value, and what to do."""


class OasisError(Exception):
    """Base of all errors this package raises on purpose."""


class ConfigError(OasisError):
    """An option, or a combination of options, that cannot be served."""


class CheckpointError(OasisError):
    """A model folder or file that cannot be read or is not supported."""


class RequestError(OasisError):
    """A request that is malformed."""


class CapacityError(RequestError):
    """A request that can never fit the pools this engine was given."""


class EngineError(OasisError):
    """The engine failed, or is closed."""


class QueueFullError(EngineError):
    """As many requests wait as may: try again later."""


class ServeError(OasisError):
    """The server did not come up, or cannot be kept up."""
