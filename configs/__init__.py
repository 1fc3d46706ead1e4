"""Ready-made configurations, installed as package data; `ecorec train --config NAME` finds them by name."""
