"""Files of the package ``templates``: cluster profiles and starter studies by name, and Jinja templates."""

from __future__ import annotations

from importlib import resources

from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    import jinja2


def toml_files(folder: str) -> dict[str, str]:
    """Text of each TOML file of a folder of ``templates``, by its name without the ending, in order."""
    files = sorted(resources.files("templates").joinpath(folder).iterdir(), key=lambda file: file.name)
    return {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in files if f.name.endswith(".toml")}


def jinja_environment(folder: str, *more: str) -> jinja2.Environment:
    """Jinja for the templates of a folder of ``templates``, and of ``more`` folders of the user after it."""
    shipped = str(resources.files("templates") / folder)
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([shipped, *more]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 (scripts and TOML, not pages; values are quoted for the shell or as TOML)
    )
