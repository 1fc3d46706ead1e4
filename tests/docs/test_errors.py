"""The guide to errors quotes messages that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = "…"


def _texts() -> str:
    """All texts of the package, with the mark of the guide for what varies."""
    found = []
    for folder in ("ecorec_torchrec", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [
                        v.value if isinstance(v, ast.Constant) else VARIABLE for v in node.values
                    ]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_quoted_messages_exist() -> None:
    guide = (ROOT / "docs" / "guides" / "errors.md").read_text().partition("# Limits")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", guide, flags=re.MULTILINE)
    assert len(messages) > 20
    texts = _texts()
    for message in messages:
        for part in message.split(VARIABLE):
            assert part.strip(" ,:;.()") in texts, f"no message says {part!r} of {message!r}"
