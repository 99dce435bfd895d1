"""Reports: HTML pages of tables and plots (``page``), plots by matplotlib (``drawing``), bars over time (``bars``)."""
