from . import transforms  # noqa: F401

__version__ = "0.0.0+standin"
