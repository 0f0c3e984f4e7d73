"""`hpctrain guide`: show the pages of the user guide, search them, or write them into a folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from hpctrain.cli.shared_options import PATH


@click.command(name="guide")
@click.argument("topic", required=False)
@click.option(
    "--search", metavar="WORDS", help="Print the lines of paragraphs that contain all of these words."
)
@click.option(
    "--write",
    "folder",
    metavar="DIR",
    type=PATH,
    help="Write all pages as files into DIR.",
)
@click.pass_context
def command(context: click.Context, topic: str | None, search: str | None, folder: Path | None) -> int:
    """List the pages of the user guide, or show page TOPIC.

    On a terminal a page is formatted; elsewhere it is printed as Markdown.
    """
    from hpctrain.errors import EXIT_DIFFERENT
    from hpctrain.guide.generated import deck_keys, python_api, verbs
    from hpctrain.guide.pages import SECTIONS, Guide, terminal_text
    from hpctrain.report.terminal import coloured, columns, stdout_console
    from hpctrain.text import fitted

    if sum(each is not None for each in (topic, search, folder)) > 1:
        raise click.UsageError("TOPIC, --search and --write conflict with each other")
    group = context.find_root().command
    assert isinstance(group, click.Group)
    guide = Guide(
        {
            "deck-keys": ("Deck keys", deck_keys),
            "verbs": ("Verbs", partial(verbs, group)),
            "python-api": ("Python API", python_api),
        }
    )
    if folder is not None:
        files = guide.write(folder)
        click.echo(f"{len(files)} pages in {folder}")
    elif search is not None:
        rows = [[hit.page.name, hit.heading, hit.line] for hit in guide.search(search.split())]
        if not rows:
            click.echo(f'no page of the guide contains "{search}"')
            return EXIT_DIFFERENT
        click.echo("\n".join(fitted([["page", "section", "text"], *rows], (0, 1, 2), columns())))
    elif topic is None:
        pages = list(guide)
        width = max(len(page.name) for page in pages)
        for section, (title, _) in SECTIONS.items():
            lines = [f"  {page.name:{width}}  {page.title}" for page in pages if page.section == section]
            click.echo("\n".join([title, *lines, ""]))
        click.echo("`hpctrain guide TOPIC` shows a page, `hpctrain guide --search WORDS` searches all pages.")
    elif coloured():
        from rich.markdown import Markdown

        stdout_console().print(Markdown(terminal_text(guide.page(topic))))
    else:
        click.echo(guide.page(topic).text, nl=False)
    return 0
