"""The double of ``triton.experimental``."""
