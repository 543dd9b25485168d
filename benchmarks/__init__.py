"""Measurements behind the choices of the design; each module prints the table that it is named after."""
