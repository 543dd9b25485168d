"""JAX's own tests of rematerialization, run with autoremat in place of JAX's: `python -m conformance --help`."""
