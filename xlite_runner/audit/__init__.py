"""Is what a start-up reserves enough for serving? Runs the worst steps that a configuration admits, and accounts.

``cases`` says which steps those are, ``probe`` runs and measures them, ``account`` compares with what was reserved.
"""
