"""Files, folders, installed packages and terminals. Nothing here knows of kernels or rows."""
