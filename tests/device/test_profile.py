"""Device profiles: what is in them, and every way in which a file can be wrong."""

from __future__ import annotations

import re

import pytest

from npusim.device.ledger import Grade
from npusim.device.profile import DeviceProfile, SocFamily, load_profile, profile_names
from npusim.errors import ProfileError

FACT_KEYS = sorted(set(DeviceProfile.__dataclass_fields__) - {"name", "family"})
TEXTS = {"soc_name": "x", "cann_version": "x", "link_topology": "mesh"}


def complete(**changes: str | None) -> str:
    """A complete profile in TOML; a change of None leaves the key out, another replaces its lines."""
    lines = [] if "family" in changes and changes["family"] is None else [changes.get("family") or 'family = "A3"']
    for key in FACT_KEYS:
        if key not in changes:
            value = f'"{TEXTS[key]}"' if key in TEXTS else "1"
            lines.append(f'[{key}]\nvalue = {value}\ngrade = "exact"\nsource = "a test"')
        elif changes[key] is not None:
            lines.append(str(changes[key]))
    return "\n".join(lines)


@pytest.fixture
def load(tmp_path):
    def load_text(text: str) -> DeviceProfile:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return load_profile(path)

    return load_text


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_are_complete_and_say_where_each_value_comes_from(name):
    profile = load_profile(name)
    assert profile.name == name
    for key in FACT_KEYS:
        fact = getattr(profile, key)
        assert fact.source, key
        assert isinstance(fact.grade, Grade)
    assert 0 <= profile.context_bytes.value < profile.total_bytes.value
    assert profile.num_vector_cores.value >= profile.num_aicore.value > 0


def test_names_are_sorted():
    assert "a3-64g" in profile_names()
    assert list(profile_names()) == sorted(profile_names())


def test_own_profile(load):
    profile = load(complete())
    assert profile.name == "mine"
    assert profile.family is SocFamily.A3
    assert profile.soc_name.value == "x"


def test_unknown_name_suggests_a_near_one():
    with pytest.raises(ProfileError, match=re.escape("unknown device profile 'a3-64'; there are ")) as caught:
        load_profile("a3-64")
    assert str(caught.value).endswith("did you mean 'a3-64g'?")


def test_unknown_name_without_a_near_one():
    with pytest.raises(ProfileError, match=r"^unknown device profile 'zzz'; there are [^;]+$"):
        load_profile("zzz")


def test_missing_file(tmp_path):
    with pytest.raises(ProfileError, match=r"device profile '.*gone\.toml' cannot be read: No such file or directory"):
        load_profile(tmp_path / "gone.toml")


def fact(key: str, value: str = "1", grade: str = '"exact"', source: str = '"a test"') -> str:
    return f"[{key}]\nvalue = {value}\ngrade = {grade}\nsource = {source}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("family = ", "device profile 'mine' is not TOML: Invalid value (at end of document)"),
        (complete(family='family = "A9"'), "device profile 'mine': family 'A9' is none of A2, A3, A5, 310P"),
        (complete(family=None), "device profile 'mine': key 'family' is missing"),
        (complete(total_bytes=None), "device profile 'mine': key 'total_bytes' is missing"),
        (
            complete() + "\n" + fact("total_byte"),
            "device profile 'mine': unknown key 'total_byte'; did you mean 'total_bytes'?",
        ),
        (complete() + "\n" + fact("zzz"), "device profile 'mine': unknown key 'zzz'"),
        (
            complete(family='family = "A3"\ntotal_bytes = 5', total_bytes=None),
            "device profile 'mine', total_bytes: must be a table of exactly value, grade and source, got 5",
        ),
        (
            complete(total_bytes='[total_bytes]\nvalue = 1\ngrade = "exact"'),
            "device profile 'mine', total_bytes: must be a table of exactly value, grade and source, got "
            + repr({"value": 1, "grade": "exact"}),
        ),
        (
            complete(total_bytes=fact("total_bytes", value='"1"')),
            "device profile 'mine', total_bytes: value must be of type int, got '1'",
        ),
        (
            complete(total_bytes=fact("total_bytes", value="true")),
            "device profile 'mine', total_bytes: value must be of type int, got True",
        ),
        (
            complete(soc_name=fact("soc_name")),
            "device profile 'mine', soc_name: value must be of type str, got 1",
        ),
        (
            complete(total_bytes=fact("total_bytes", value="-1")),
            "device profile 'mine', total_bytes: value must not be negative, got -1",
        ),
        (
            complete(hbm_bytes_per_s=fact("hbm_bytes_per_s", value="0")),
            "device profile 'mine', hbm_bytes_per_s: a rate must be more than 0",
        ),
        (
            complete(link_topology=fact("link_topology", value='"ring"')),
            "device profile 'mine', link_topology: value must be one of mesh, switch, got 'ring'",
        ),
        (
            complete(total_bytes=fact("total_bytes", grade='"sure"')),
            "device profile 'mine', total_bytes: grade 'sure' is none of exact, calibrated, assumed",
        ),
        (
            complete(total_bytes=fact("total_bytes", source='""')),
            "device profile 'mine', total_bytes: source must say where the value comes from, got ''",
        ),
    ],
)
def test_refusals(load, text, message):
    with pytest.raises(ProfileError, match=f"^{re.escape(message)}$"):
        load(text)
