"""Tests the rules, the defaults and the JSON of `FitConfig`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import tfmulti
from tfmulti.config.fit_config import FitConfig, read_config_file
from tfmulti.config.flags import help_text, make_flags
from tfmulti.config.run_directory import RunDir
from tfmulti.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "mirored"}, "did you mean 'mirrored'"),
        ({"model": "resnet5"}, "did you mean 'resnet50'"),
        ({"dataset": "digts"}, "did you mean 'digits'"),
        ({"dataset": "digits:a=1"}, "takes no options"),
        ({"optimizer": "adm"}, "did you mean 'adam'"),
        ({"precision": "float16"}, "no precision 'float16'"),
        ({"learning_rate_decay": "cosin"}, "did you mean 'cosine'"),
        ({"replicas": 0}, "replicas is 0, but it must be at least 1"),
        ({"epochs": "x"}, "epochs is 'x', but it must be of type int"),
        ({"epochs": True}, "epochs is True"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": None}, "seed is None"),
        ({"learning_rate": 0.0}, "must be above 0"),
        ({"learning_rate": float("nan")}, "must be a finite number"),
        ({"seed": 2**32}, "seed is 4294967296, but it must be below"),
        ({"momentum": 1.0}, "must be below 1"),
        ({"global_batch_size": 4, "per_replica_batch_size": 2}, "both .* 4 and .* 2"),
        ({"dataset": "npz:a.npz"}, "no batch size was given for"),
        ({"dataset": "json:loads"}, "no batch size was given for"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        FitConfig(**values)
    assert "\n" not in str(caught.value)


def test_resolved_takes_the_data_sets_defaults() -> None:
    resolved = FitConfig(dataset="regression").resolved("vector")
    assert (resolved.model, resolved.global_batch_size, resolved.epochs) == ("mlp", 16, 10)
    assert (resolved.steps_per_epoch, resolved.learning_rate) == (10, 0.01)


def test_resolved_keeps_what_was_given() -> None:
    resolved = FitConfig(per_replica_batch_size=5, model="vit", learning_rate=0.5).resolved("image")
    assert (resolved.global_batch_size, resolved.per_replica_batch_size) == (None, 5)
    assert (resolved.model, resolved.learning_rate) == ("vit", 0.5)


@pytest.mark.parametrize(
    ("kind", "model"), [("image", "cnn"), ("vector", "mlp"), ("tokens", "transformer")]
)
def test_the_default_model_takes_the_data(kind: str, model: str) -> None:
    assert FitConfig(dataset="synthetic").resolved(kind).model == model


def test_json_starts_the_same_run_again(tmp_path: Path) -> None:
    config = FitConfig(dataset="digits", epochs=2, run_dir="here", dry_run=True).resolved("image")
    file = tmp_path / "config.json"
    file.write_text(config.to_json())
    again = FitConfig(**read_config_file(str(file)))
    assert again == dataclasses.replace(config, run_dir=None, dry_run=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON.*line 1"),
        ("[1]", "must hold a JSON object"),
        ('{"strategyy": 1}', "no field 'strategyy'; did you mean 'strategy'"),
        ('{"sync_every": 5}', "sync_every was removed: workers no longer train alone"),
        (None, "No such file"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_config_file_mistakes(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=message):
        read_config_file(str(file))


def test_every_field_has_help() -> None:
    shown = help_text("", make_flags())
    for item in dataclasses.fields(FitConfig):
        assert item.metadata["help"]
        since = item.metadata["since"]
        assert Version("0.1.0") <= Version(since) <= Version(tfmulti.__version__)
        assert re.search(rf"^  --{item.name} \(.*; since {re.escape(since)}\)$", shown, re.M)
    assert "--validation_fraction (number, at least 0, below 1; since 0.1.0)" in shown
    assert "--run_dir (file or folder; since 0.1.0)" in shown
    assert "epochs" in json.loads(FitConfig().to_json())


def test_a_configuration_of_an_older_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"backup_every_s": 5.0, "keep_backups": 3, "sync_every": null, "outer_momentum": 0.0}'
    )
    assert read_config_file(str(path)) == {"checkpoint_every_s": 5.0, "keep_checkpoints": 3}


def test_a_run_directory_of_an_older_version_keeps_its_folder(tmp_path: Path) -> None:
    run_dir = RunDir(str(tmp_path))
    assert run_dir.checkpoints == tmp_path / "checkpoints"
    (tmp_path / "backups").mkdir()
    assert run_dir.checkpoints == tmp_path / "backups"
