"""Rules that print the rows of a record as a block: one file each, with `text(rows, **options)`."""
