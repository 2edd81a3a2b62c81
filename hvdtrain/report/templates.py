"""Templates of the pages."""

from pathlib import Path

import jinja2

HERE = Path(__file__).parent


def load_template(path: Path) -> jinja2.Template:
    """Return a template, which escapes all values; it may include those of this folder."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([path.parent, HERE]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(path.name)
