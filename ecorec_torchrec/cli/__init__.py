"""The `ecorec` program: one module per command, loaded only when it runs."""

from ecorec_torchrec.cli.main import main

__all__ = ["main"]
