"""Pydantic fields made from the fields of option sets, with the option's own check and message."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nbflow.option_fields import OptionField, OptionSet, fields, json_schema
from nbflow_kernels.errors import UsageError


class Checked:
    """Type annotation that validates values by an option.

    `name` is the field's in messages.  With `http` it is a field of a request, otherwise a key of a
    TOML file.
    """

    def __init__(self, known: OptionField, name: str, http: bool) -> None:
        self._known, self._name, self._http = known, name, http

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that pydantic validates with."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _: Any, __: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema for the description of the endpoints."""
        return json_schema(self._known)

    def _check(self, value: Any) -> Any:
        if value is None and self._known.default is None:
            return None
        try:
            return self._known.checked(value, outside=True, http=self._http, name=self._name)
        except UsageError as error:
            raise out_of_bounds(str(error), self._name) from None


@dataclass(frozen=True)
class MayBeFile:
    """Annotation of fields that may name files, relative to the configuration's folder."""

    suffix: str = ""
    """Suffix of such names; other values are not file names."""

    def found(self, name: str, folder: Path) -> str:
        """Return the path of a file in a folder; the name unchanged if the file is missing."""
        if len(name) > 4096 or "\n" in name or "{" in name or not name.endswith(self.suffix):
            return name
        return str(folder / name) if (folder / name).exists() else name


def http_option(kind: type[OptionSet], option: str, name: str | None = None) -> Checked:
    """Return the annotation of an option as the field `name` of HTTP requests."""
    known = fields(kind)[option]
    return Checked(known, name or known.http_name, True)


def http_fields(kind: type[OptionSet]) -> dict[str, Any]:
    """Return the HTTP fields of an option set for `pydantic.create_model`."""
    found: dict[str, Any] = {}
    for known in fields(kind).values():
        if name := known.http_name:
            default = None if known.option.http_default else known.default
            found[name] = Annotated[Any, Checked(known, name, True)], Field(default=default)
    return found


def toml_fields(kind: type[OptionSet]) -> dict[str, Any]:
    """Return the TOML keys of an option set for `pydantic.create_model`."""
    found: dict[str, Any] = {}
    for known in fields(kind).values():
        if known.option.toml:
            annotation: Any = Annotated[Any, Checked(known, known.name, False)]
            if known.option.file:
                annotation = Annotated[annotation, MayBeFile(known.option.suffix)]
            found[known.name] = annotation, Field(default=known.default)
    return found


def out_of_bounds(text: str, param: str, kind: Any = "out_of_bounds") -> Exception:
    """Return pydantic's error for a field with a literal message."""
    # pydantic needs valid Unicode, and formats braces in the template
    text, param = (t.encode("utf-8", "backslashreplace").decode() for t in (text, param[:100]))
    return PydanticCustomError(kind, "{text}", {"text": text, "param": param})
