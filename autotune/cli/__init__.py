"""The command line: options, commands, progress and what they print. Only this package prints."""
