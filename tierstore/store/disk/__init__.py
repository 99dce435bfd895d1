"""A store on disk: its directories, the extent files in them, and the space of their slots."""
