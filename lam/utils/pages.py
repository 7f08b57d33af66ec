"""Self-contained HTML pages from jinja2 templates; `page.html.jinja` holds the macros that they share."""

import base64
from pathlib import Path
from typing import Any

_WIDE = 1.45  # a picture with a greater ratio of width to height takes a row of its own


def rendered(template: Path, **values: Any) -> str:
    """A rendered template, which may include templates of its own folder and `page.html.jinja`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "duration": _duration}
    return environment.get_template(template.name).render(values)


def figure(title: str, caption: str, png: bytes) -> dict[str, Any]:
    """Argument of the macro `figures` for a PNG picture at twice the resolution of a screen."""
    width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))
    return {
        **{"title": title, "caption": caption, "content": base64.b64encode(png).decode()},
        **{"width": width // 2, "height": height // 2, "wide": width > _WIDE * height},
    }


def _number(value: float | int, digits: int = 4) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    least = 10**-digits
    if 0 < value < least / 2:  # a p-value that would read as zero
        return f"< {least:.{digits}f}"
    return f"{value:.2e}".replace("e+0", "e") if abs(value) >= 1e4 else f"{value:.{digits}f}"


def _duration(seconds: float | int) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{seconds / 60:.1f} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
