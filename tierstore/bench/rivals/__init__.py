"""The same training by other libraries and by tierstore, in turns."""
