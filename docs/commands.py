"""What the site has of its own: `olla-commands` writes what `olla --help` and the help of every command say."""

import argparse
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

from olla.cli.parser import make_parser

_WIDTH = 100  # columns


class OllaCommands(Directive):
    """Writes a section per command, its help as printed."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        parser = make_parser()
        (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parsers: dict[str, argparse.ArgumentParser] = {"olla": parser}
        parsers.update((f"olla {name}", command) for name, command in commands.choices.items())
        return [_section(name, command) for name, command in parsers.items()]


def _section(name: str, parser: argparse.ArgumentParser) -> nodes.section:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=_WIDTH)
    text = parser.format_help()
    section = nodes.section(ids=[nodes.make_id(name)], names=[nodes.fully_normalize_name(name)])
    section += nodes.title(name, name)
    section += nodes.literal_block(text, text, language="text")
    return section


def setup(app: Sphinx) -> dict[str, Any]:
    """Make the directive known, and CSV, which Pygments does not know."""
    app.add_lexer("csv", TextLexer)
    app.add_directive("olla-commands", OllaCommands)
    return {"parallel_read_safe": True}
