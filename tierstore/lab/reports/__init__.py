"""Reports: HTML pages with plots and tables, and the tables in Markdown."""
