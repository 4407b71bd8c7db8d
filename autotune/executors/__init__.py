"""Where a sweep's processes run: this machine or a Ray cluster."""
