"""The command line as a page of the documentation: `python -m routeguard.cli.document`."""

from __future__ import annotations

import inspect

import click

from routeguard.cli.main import app

_INTRODUCTION = """\
# Command line

This page is written by `python -m routeguard.cli.document` from the commands themselves; a test checks that it is
current. `--help` after any command prints the same.

Exit codes: 0 done; 1 a check failed; 2 the call could not be carried out (bad input); 3 a file could not be read or
written. Every command with `--json` prints its whole result for other programs. Commands that compare or repair
checkpoints (`inspect`, `verify`, `drift`, `restore`, `average`, `undo`) load no model. Colour and progress bars are
left out where the output is no terminal, and colour where `NO_COLOR` is set.

Completion of commands and options, for bash (`zsh_source` and `fish_source` for the others, into `~/.zshrc` or
`~/.config/fish/completions/routeguard.fish`):

```text
echo 'eval "$(_ROUTEGUARD_COMPLETE=bash_source routeguard)"' >> ~/.bashrc
```
"""


def document() -> str:
    """The page as Markdown."""
    context = click.Context(app, info_name="routeguard", **app.context_settings)
    return _INTRODUCTION + "".join(_section(command, context, name) for name, command in _ordered(app, context))


def _ordered(group: click.Group, context: click.Context) -> list[tuple[str, click.Command]]:
    """The commands of a group, as its help lists them."""
    return [(name, group.commands[name]) for name in group.list_commands(context)]


def _section(command: click.Command, parent: click.Context, name: str) -> str:
    context = click.Context(command, info_name=name, parent=parent)
    level = context.command_path.count(" ") + 1
    lines = [f"\n{'#' * level} {context.command_path}\n", inspect.cleandoc(command.help or "") + "\n"]
    lines.append(f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n")
    if isinstance(command, click.Group):
        parts = [_section(sub, context, title) for title, sub in _ordered(command, context)]
        return "\n".join(lines) + "".join(parts)
    records = [option.get_help_record(context) for option in command.params if isinstance(option, click.Option)]
    lines.append("| option | meaning |\n|---|---|")
    lines += [f"| `{_cell(record[0])}` | {_cell(record[1])} |" for record in records if record is not None]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(document(), end="")
