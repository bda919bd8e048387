"""Importable doubles of the vendor's packages. The folder itself is put on ``sys.path``, so they have the vendor's names."""
