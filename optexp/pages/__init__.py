"""Result pages: a record of measured rows, a rule that prints them, and a block of a page that holds the print.

`data/PAGE.json` is the record of the block between `<!-- measured -->` and `<!-- /measured -->` in PAGE.md, and
`data/PAGE.BLOCK.json` that of the block `BLOCK`. A record names its rule, a file in `optexp/pages/rules/`. A benchmark
writes the record; `python -m optexp.audit --pages` prints it again and compares.
"""
