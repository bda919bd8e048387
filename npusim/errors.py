"""Every error that npusim raises in its own name.

Errors raised *in the vendor's place* (out of memory, a failed ACL call, xlite's checks) have the vendor's class and
text instead; npusim's explanation then follows as a note on the exception.
"""

from __future__ import annotations


class NpusimError(Exception):
    """Root of npusim's own errors: the simulation was asked for something it must refuse."""


class ProfileError(NpusimError):
    """A device profile is missing, unreadable or inconsistent; the text names the key, the value, what is allowed."""


class WorldError(NpusimError):
    """A world was built or used in a way that cannot work, e.g. two active worlds, or none where one is needed."""


class MarkerError(NpusimError):
    """A pytest marker of npusim has arguments that it cannot have; the text shows it and says what is expected."""


class RecordingError(NpusimError):
    """A file is no recording of a device, or one that cannot be used for what was asked; the text names it."""


class MissingPackageError(NpusimError):
    """A package that is not installed is needed for what was asked; the text says how to get it."""


class UnmodelledCallError(NpusimError, NotImplementedError):
    """The vendor API was called in a way that the double does not model.

    Nothing is faked: add the call to the double, or keep the test on hardware. The text names the call.
    """


class UncomputedValueError(NpusimError, RuntimeError):
    """A value was read from a simulated tensor that has a shape but no numbers behind it.

    In shape mode only what follows from data made on the host is computed. Read a tensor that has values, or run the
    scenario in real mode.
    """


class CollectiveMismatchError(NpusimError, RuntimeError):
    """Ranks met in a collective with different operations or sizes, or one of them never arrived."""


class RankMissingError(CollectiveMismatchError):
    """A rank waited in a collective for one that has ended, or that waits elsewhere: on a card it would hang."""


class UnmodelledNameError(UnmodelledCallError, AttributeError):
    """A name of a vendor package was asked for that the double does not have; ``hasattr`` answers False."""
