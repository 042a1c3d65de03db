"""The configuration: every bound, every reader, files, combinations and the hash."""

import dataclasses
import tomllib

import pytest

from dflash.config import SECTIONS, TrainConfig, config_hash
from dflash.errors import ConfigError, Exit
from dflash.fields import flag_of, key_of

REQUIRED = {
    "model": {"target-model": "target"},
    "data": {"data-dir": "data"},
    "run": {"output-dir": "out"},
}


def nested(**sections):
    """The required options with the given sections on top."""
    names = REQUIRED.keys() | sections.keys()
    return {name: REQUIRED.get(name, {}) | sections.get(name, {}) for name in names}


def build(section, name, value):
    room = ROOM.get(name, {})
    given = room | {section: room.get(section, {}) | {key_of(name): value}}
    return TrainConfig.from_dict(nested(**given))


def bounded_fields():
    """Every option with a bound: a value just outside, and one just inside."""
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            about = field.metadata["option"]
            step = 1 if field.type in (int, int | None) else 1e-6
            edges = {
                "at_least": (about.at_least, -step, 0),
                "above": (about.above, 0, step),
                "at_most": (about.at_most, step, 0),
                "below": (about.below, 0, -step),
            }
            for rule, (bound, outside, inside) in edges.items():
                if bound is not None:
                    yield pytest.param(
                        section,
                        field.name,
                        bound + outside,
                        bound + inside,
                        id=f"{field.name}-{rule}",
                    )


# What makes room for a value just inside its bound where a rule spans two options.
ROOM = {
    "token_budget": {"data": {"max-seq-len": 2}},
    "max_draft_positions": {"model": {"block-size": 2}},
}


@pytest.mark.parametrize(("section", "name", "outside", "inside"), list(bounded_fields()))
def test_every_bound_is_enforced_and_names_option_value_and_rule(section, name, outside, inside):
    with pytest.raises(ConfigError) as caught:
        build(section, name, outside)
    assert caught.value.option == flag_of(name)
    assert str(caught.value).startswith(f"{flag_of(name)} must be ")
    assert str(caught.value).endswith(f", got {outside}")
    assert caught.value.remedy
    assert caught.value.exit_code == Exit.USAGE

    config = build(section, name, inside)
    assert getattr(getattr(config, section), name) == inside


def test_the_message_is_a_sentence():
    with pytest.raises(ConfigError, match=r"^--block-size must be at least 2, got 1$"):
        build("model", "block_size", 1)


@pytest.mark.parametrize(
    ("section", "name", "value", "rule"),
    [
        ("optimizer", "lr", float("nan"), "must be a finite number"),
        ("optimizer", "lr", float("inf"), "must be a finite number"),
        ("optimizer", "lr", "6e-4", "must be a finite number"),
        ("optimizer", "epochs", 1.5, "must be a whole number"),
        ("optimizer", "epochs", True, "must be a whole number"),
        ("optimizer", "epochs", None, "must be a whole number"),
        ("objective", "use_soft_labels", 1, "must be true or false"),
        ("objective", "noise_type", "pink", "must be one of uniform, gaussian"),
        ("model", "target_model", "", "must be a non-empty text"),
        ("model", "target_layer_ids", "9,1", "must be in increasing order"),
        ("model", "target_layer_ids", [1, 1], "must be in increasing order"),
        ("model", "target_layer_ids", "1,-2", "must be numbers from 0 on"),
        ("model", "target_layer_ids", [], "must be numbers from 0 on"),
        ("devices", "target_gpus", "", "must be GPU numbers"),
        ("devices", "target_gpus", "tpu:0", "must be GPU numbers"),
        ("devices", "target_gpus", "0,,1", "must be GPU numbers"),
        ("devices", "drafter_gpus", [], "must be GPU numbers"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(section, name, value, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        build(section, name, value)
    assert caught.value.option == flag_of(name)


@pytest.mark.parametrize(
    ("raw", "devices"),
    [
        ("0,1", ("cuda:0", "cuda:1")),
        ("cuda:1", ("cuda:1",)),
        ("cpu,cpu", ("cpu", "cpu")),
        ("cpu, 0", ("cpu", "cuda:0")),
        ([0, "cuda:0"], ("cuda:0", "cuda:0")),
    ],
)
def test_devices_are_read_in_every_spelling(raw, devices):
    assert build("devices", "drafter_gpus", raw).devices.drafter_gpus == devices


@pytest.mark.parametrize(
    ("sections", "option"),
    [
        ({"data": {"max-seq-len": 100, "token-budget": 99}}, "--max-seq-len"),
        (
            {"objective": {"max-draft-positions": 7}, "model": {"block-size": 8}},
            "--max-draft-positions",
        ),
        ({"logging": {"wandb-run-name": "first"}}, "--wandb-run-name"),
    ],
)
def test_impossible_combinations_are_named(sections, option):
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(nested(**sections))
    assert caught.value.option == option


@pytest.mark.parametrize("section", REQUIRED)
def test_required_options_are_named(section):
    with pytest.raises(ConfigError, match=r"^--[a-z-]+ is required$") as caught:
        TrainConfig.from_dict({name: v for name, v in REQUIRED.items() if name != section})
    (key,) = REQUIRED[section]
    assert f"--{key}" in caught.value.remedy
    assert f"[{section}]" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "named", "hint"),
    [
        ("[model]\nblok-size = 8", "'blok-size'", "'block-size'"),
        ("[model]\nblock_size = 8", "'block_size'", "'block-size'"),
        ("[data]\nblock-size = 8", "'block-size'", "belongs under [model]"),
        ("[modle]\nblock-size = 8", "'modle'", "'model'"),
        ("block-size = 8", "'block-size'", "[model]"),
    ],
)
def test_an_unknown_key_is_named_with_its_file_and_the_nearest_known(tmp_path, text, named, hint):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_toml(path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)
    assert hint in caught.value.remedy


@pytest.mark.parametrize("content", [b"[model", b"\xff\xfe", None])
def test_a_file_that_is_not_toml_is_a_config_error(tmp_path, content):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^--config must be") as caught:
        TrainConfig.from_toml(path)
    assert str(path) in str(caught.value)


AWKWARD = "".join(map(chr, range(1, 0x100))) + '"""\\u0041 😀'


def test_a_saved_file_repeats_the_run(tmp_path):
    config = TrainConfig.from_dict(
        nested(
            model={"target-model": AWKWARD, "target-layer-ids": "1,9,17"},
            optimizer={"lr": 1e-9, "weight-decay": 1},
            devices={"target-gpus": "0,cpu"},
            objective={"use-soft-labels": True},
        )
    )
    config.save_toml(tmp_path / "run.toml")
    again = TrainConfig.from_toml(tmp_path / "run.toml")
    assert again == config
    assert config_hash(again) == config_hash(config)
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_the_saved_file_lists_every_option_that_has_a_value():
    saved = tomllib.loads(TrainConfig.from_dict(REQUIRED).to_toml())
    assert saved.keys() == SECTIONS.keys()
    for section, cls in SECTIONS.items():
        not_given = {key_of(f.name) for f in dataclasses.fields(cls) if f.default is None}
        keys = {key_of(field.name) for field in dataclasses.fields(cls)}
        assert saved[section].keys() == keys - not_given


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("run", "output-dir", "elsewhere"),
        ("run", "resume", "auto"),
        ("run", "stall-timeout-s", 1),
        ("run", "queue-capacity", 3),
        ("logging", "log-format", "lines"),
        ("data", "num-prefetch-threads", 1),
    ],
)
def test_what_does_not_determine_the_result_is_not_hashed(section, key, value):
    changed = TrainConfig.from_dict(nested(**{section: {key: value}}))
    assert config_hash(changed) == config_hash(TrainConfig.from_dict(REQUIRED))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "block-size", 8),
        ("data", "seed", 1),
        ("devices", "drafter-gpus", "0,0"),
        ("objective", "gamma", 7.5),
        ("optimizer", "epochs", 5),
    ],
)
def test_what_determines_the_result_is_hashed(section, key, value):
    changed = TrainConfig.from_dict(nested(**{section: {key: value}}))
    assert config_hash(changed) != config_hash(TrainConfig.from_dict(REQUIRED))


def test_a_config_cannot_be_changed():
    config = TrainConfig.from_dict(REQUIRED)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.data.seed = 1
