"""Keys to sweep: from models, shapes, presets and files."""
