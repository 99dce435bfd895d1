"""Pipeline stages: which layers each has, its own sequence of passes, and the steps through all of them."""
