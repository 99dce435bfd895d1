"""Where records lie: a store's directories, the extent files in them, and the space of their slots."""
