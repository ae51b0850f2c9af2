"""Options that several commands have."""

from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option("--url", help="The router's HTTP address. Default: the one that runs here."),
]
Controller = Annotated[
    str | None,
    typer.Option(
        "--controller",
        metavar="HOST:PORT",
        help="The controller. Default: of the deployment that runs here.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the file. Repeatable."),
]
Grace = Annotated[
    float | None,
    typer.Option(min=0, max=3600, help="Seconds for what runs there. Default: 30."),
]
