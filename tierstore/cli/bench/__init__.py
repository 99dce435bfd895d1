"""``tierstore bench``: a file for each larger benchmark, of several ranks in ``ranks``; the smaller ones in ``group``."""
