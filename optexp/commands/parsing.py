"""Command lines of the commands beside the main one."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter


def parser_of(command: str, description: str | None) -> ArgumentParser:
    """A parser for `python -m optexp.<command>`.

    Args:
        description: Docstring of the command's module; --help prints it as it is written.
    """
    return ArgumentParser(
        prog=f"python -m optexp.{command}", description=description, formatter_class=RawDescriptionHelpFormatter
    )
