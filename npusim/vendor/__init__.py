"""Importable doubles of the vendor's packages; the folder is put on ``sys.path``, so they have the vendor's names."""
