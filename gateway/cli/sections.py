"""Options of a command in named groups: a command takes a few dataclasses instead of thirty parameters."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every dataclass parameter replaced by its fields, for typer to read.

    A field is `name: Annotated[type, typer.Option(...)] = default`; names must differ between the dataclasses.
    """
    hints = get_type_hints(command, include_extras=True)
    sections: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(kind, include_extras=True)
        fields = dataclasses.fields(kind)
        sections[parameter.name] = (kind, [field.name for field in fields])
        parameters.extend(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
            )
            for field in fields
        )

    def run(**given: Any) -> None:
        built = {name: kind(**{field: given.pop(field) for field in names}) for name, (kind, names) in sections.items()}
        command(**given, **built)

    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect.signature
    return run
