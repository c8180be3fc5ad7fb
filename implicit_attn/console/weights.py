"""``implicit-attn weights``: the shipped models, and where their files are."""

from __future__ import annotations

from collections.abc import Sequence

from implicit_attn.command_line import Parser, command, mistakes
from implicit_attn.weights import Pretrained, pretrained_models, weights_path


def parser() -> Parser:
    """``weights``, or ``weights path NAME``."""
    made = Parser(
        description="The trained models that come with the package. "
        "In Python: implicit_attn.load_pretrained(NAME)."
    )
    under = made.add_subparsers(dest="action", metavar="ACTION")
    under.add_parser("list", help="names, parameters, accuracy, command of the training (default)")
    one = under.add_parser("path", help="the file of a model")
    # Not choices: the message of an unknown name has the nearest ones.
    one.add_argument("model", metavar="NAME", help=f"one of {', '.join(pretrained_models())}")
    return made


def main(words: Sequence[str]) -> None:
    """Print the list, or the path of one file."""
    top = parser()
    with command(top):
        options = top.parse_args(words)
        if options.action == "path":
            with mistakes():
                print(weights_path(options.model))
            return
        print("\n\n".join(described(row) for row in pretrained_models().values()))


def described(row: Pretrained) -> str:
    """The lines of one model."""
    size = row.path.stat().st_size
    return "\n".join(
        (
            f"{row.name}: {row.title}",
            f"  data        {row.data}",
            f"  result      {row.measured}",
            f"  size        {row.parameters:,} parameters, {size / 1000:,.0f} kB",
            f"  trained by  {row.command}",
        )
    )
