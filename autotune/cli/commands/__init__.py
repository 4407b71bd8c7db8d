"""Commands, one module each: parse, call, print. Nothing heavy is imported outside a command's body."""
