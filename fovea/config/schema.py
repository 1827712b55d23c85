"""The JSON schema of recipes: all settings with types, ranges, defaults and descriptions, for editors and for help."""

from __future__ import annotations

from functools import cache
from types import NoneType
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, NoDefault

from fovea.config.run import Config
from fovea_gym.settings.base import NAME, Section, is_union, names_of, sections_of, variants_of
from fovea_gym.utils import entry_points

DISCRIMINATOR_KEY, ALIAS_KEY = "discriminator", "sets"
"""Schema keys that mark a union of sections, and an alias with the settings that it sets."""


class _RecipeSchema(GenerateJsonSchema):
    """Requires no key, since a recipe may be layered over others, and allows the short forms of sections."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def get_default_value(self, schema: Any) -> Any:
        made = schema["default_factory"]() if "default_factory" in schema else schema["default"]
        return NoDefault if isinstance(made, Section) else made

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        made, section = super().model_schema(schema), schema["cls"]
        if not issubclass(section, Section):
            return made
        for unwanted in {"title", "required"} & made.keys():
            del made[unwanted]
        nodes = made["properties"]
        for name, field in section.model_fields.items():
            if is_union(field) or sections_of(field):
                nodes[name] = {key: nodes[name][key] for key in nodes[name] if key not in ("oneOf", "$ref", "type")}
                nodes[name] |= self._of_sections(field)
        for name in section.short_lists:
            nodes[name]["type"] = ["array", "string"]
        for alias, names in section.aliases.items():
            like = {key: value for key, value in nodes[names[0]].items() if key != "default"}
            nodes[alias] = like | {"description": f"Sets {' and '.join(names)}.", ALIAS_KEY: [*names]}
        return made

    def _of_sections(self, field: FieldInfo) -> JsonSchemaValue:
        """A field that holds a section, with the short forms that `fovea_gym.settings.base.long_forms` expands."""
        chosen = is_union(field)
        sections = [*variants_of(field).values()] if chosen else [*sections_of(field)]
        forms = [self.generate_inner(section.__pydantic_core_schema__) for section in sections]
        if names := names_of(field) if chosen else [name for section in sections for name in section.bundles]:
            forms.append({"type": "string", "enum": names})
        elif chosen:
            forms.append({"type": "string"})
        if "own" in names:
            forms.append({"type": "string", "pattern": r"\.py"})
        if NoneType in get_args(field.annotation):
            forms.append({"type": ["boolean", "null"]})
        made = forms[0] if len(forms) == 1 else {"anyOf": forms}
        return made | ({DISCRIMINATOR_KEY: {"propertyName": NAME}} if chosen else {})


def recipe_schema() -> JsonSchemaValue:
    """The JSON schema of recipes, with the sections of other packages that have been imported."""
    return _recipe_schema(entry_points.state())


@cache
def _recipe_schema(_state: object) -> JsonSchemaValue:
    return Config.model_json_schema(schema_generator=_RecipeSchema)
