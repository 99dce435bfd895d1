"""Raw disks: jobs through the engine beside fio and other libraries."""
