"""Errors that a user can mend. Each message is one line: what was wrong, where, what to do."""


class ProtosteerError(Exception):
    """Base of every error that protosteer raises on purpose."""


class SettingsError(ProtosteerError, ValueError):
    """A setting is unknown or has an impossible value."""


class WeightsError(ProtosteerError):
    """Backbone weights are absent, unreadable or of another architecture."""


class OtherWeights(WeightsError):
    """Weights are not those that were asked for by their fingerprint."""


class DataError(ProtosteerError, ValueError):
    """Images or labels cannot be used as they are."""


class LearnerError(ProtosteerError):
    """The learner was asked for something its state does not allow."""


class ModelFileError(ProtosteerError):
    """A model file is damaged, of another format, or belongs to another backbone."""


class TrainingError(ProtosteerError):
    """Training cannot go on, for instance because the loss is no longer finite."""


class RunError(ProtosteerError):
    """A run folder cannot be used as asked: it holds another run, or is in use."""


class GroupError(ProtosteerError):
    """Processes that work together cannot meet, or have lost one another."""


class EngineError(ProtosteerError):
    """Jobs cannot be done where they were to be done: no Ray, nobody at its address, workers that die."""


class ProtosteerWarning(UserWarning):
    """Something works but is probably not what the user wants."""
