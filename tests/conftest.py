"""What every test runs under."""

import os

# Before torch is imported. Many tests start processes of their own: one thread each, and no spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Those processes find the installed package, not the checkout that pytest was called from.
os.environ.setdefault("PYTHONSAFEPATH", "1")
