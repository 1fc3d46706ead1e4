"""Ready-made configurations; `ecorec train --config NAME` finds them by name."""
