from __future__ import annotations

import pytest
from pydantic import Field, model_validator

from common.config.base import ConfigError, FrozenConfig
from common.config.loading import load_config, parse_set


class Inner(FrozenConfig):
    """A table."""

    size: int = Field(default=1, ge=1)
    """How big."""


class Outer(FrozenConfig):
    """A file."""

    name: str
    """What it is called."""
    inner: Inner = Inner()
    """A table."""
    many: dict[str, Inner] = Field(default_factory=dict)
    """Named tables."""
    rows: list[Inner] = Field(default_factory=list)
    """Tables in order."""

    @model_validator(mode="after")
    def _names_match(self):
        if self.name == "inner" and self.inner.size == 1:
            raise ValueError('name = "inner" needs inner.size above 1')
        return self


@pytest.fixture
def file(tmp_path):
    def write(text, name="f.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def problems(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, *args, **kwargs)
    return str(caught.value)


def test_sets_go_over_overrides_over_the_file_over_defaults(file):
    path = file('name = "f"\n[inner]\nsize = 2\n')
    assert load_config(Outer, path).inner.size == 2
    assert load_config(Outer, path, overrides={"inner.size": 3}).inner.size == 3
    both = load_config(Outer, path, overrides={"inner.size": 3}, sets=["inner.size=4"])
    assert (both.name, both.inner.size) == ("f", 4)


def test_resolved_json_is_read_back(file):
    config = load_config(Outer, None, sets=["name=a", "many.x.size=5"])
    assert load_config(Outer, file(config.resolved_json(), "f.json")) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1.5", 1.5),
        ("a=true", True),
        ('a="1"', "1"),
        ("a=[1, 2]", [1, 2]),
        ("a={b = 1}", {"b": 1}),
        ("a=plain words", "plain words"),
        ("a=x=y", "x=y"),
        ("a=", ""),
    ],
)
def test_set_reads_toml_and_else_text(text, value):
    assert parse_set(text) == ("a", value)


@pytest.mark.parametrize("text", ["a", "=1", "a..b=1", ".a=1"])
def test_set_without_key_or_value_is_refused(text):
    with pytest.raises(ConfigError, match="key=value"):
        parse_set(text)


def test_every_problem_is_named_with_key_value_and_what_is_legal(file):
    path = file("[inner]\nsize = 0\nsizes = 3\n[many.x]\nsize = 'b'\n[[rows]]\nsize = -1\n")
    text = problems(path)
    assert str(path) in text
    assert "inner.size = 0: should be greater than or equal to 1" in text
    assert "inner.sizes: unknown key; legal here: size. Did you mean 'size'?" in text
    assert "many.x.size = 'b': should be a valid integer" in text
    assert "rows.0.size = -1: should be greater than or equal to 1" in text
    assert "name: has to be given, it has no default" in text


def test_unknown_key_at_the_top_lists_the_legal_ones():
    text = problems(None, sets=["name=a", "nme=b"])
    assert "nme: unknown key; legal here: inner, many, name, rows. Did you mean 'name'?" in text
    assert "--set nme=b" in text


def test_rule_over_several_keys_speaks_for_itself():
    assert 'name = "inner" needs inner.size above 1' in problems(None, sets=["name=inner"])


def test_value_where_a_table_belongs_is_named():
    assert "inner is 3, not a table" in problems(None, sets=["inner=3", "inner.size=2"])


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("a = = 1", "f.toml", "malformed"),
        ("{", "f.json", "malformed"),
        ("[1]", "f.json", "holds list, not a table"),
        ("", "f.yaml", "legal are .toml and .json"),
    ],
)
def test_file_that_is_none_is_named(file, text, name, words):
    path = file(text, name)
    message = problems(path)
    assert str(path) in message
    assert words in message


def test_missing_file_is_named(tmp_path):
    assert "absent.toml cannot be read" in problems(tmp_path / "absent.toml")


def test_config_is_frozen_and_described():
    config = load_config(Outer, None, sets=["name=a"])
    with pytest.raises(ValueError, match="frozen"):
        config.name = "b"
    assert Outer.model_fields["name"].description == "What it is called."
