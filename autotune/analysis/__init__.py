"""What only reads rows and tables: check, diff, explain, overview, report."""
