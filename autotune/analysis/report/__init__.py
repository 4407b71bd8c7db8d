"""One page about results folders: rows to plain data (`data`), and that to one HTML file (`page`)."""
