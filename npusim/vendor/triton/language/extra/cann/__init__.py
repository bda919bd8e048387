"""The double of ``triton.language.extra.cann``."""
