"""`python -m cli` is `pdserve`."""

from cli.main import main

main()
