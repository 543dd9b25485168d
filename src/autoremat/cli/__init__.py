"""The command line `autoremat`: `plan`, `residuals`, `frontier`, `demo`.

`_main` has the group and the only place where errors become exit codes; each command has a file of its own. `_input` reads
`FILE.py:NAME`, `_data` turns results into plain data, `_output` prints them.
"""

from autoremat.cli._main import main as main
