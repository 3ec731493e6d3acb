"""Tests the script that runs public programs, as far as it needs no checkout of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.programs import downloads, public, stand_ins, synthetic
from tests.programs.public_programs import PUBLIC


def test_data_are_cut_in_any_form() -> None:
    x = np.zeros((100, 2))
    found = synthetic.cut(({"a": x, "b": [x, None]}, tf.zeros((100, 3))))
    assert found[0]["a"].shape == (synthetic.ROWS, 2)
    assert found[0]["b"][0].shape == (synthetic.ROWS, 2)
    assert found[0]["b"][1] is None
    assert found[1].shape == (synthetic.ROWS, 3)
    batches = synthetic.cut(tf.data.Dataset.from_tensor_slices(x).batch(10))
    assert len(list(batches)) == synthetic.STEPS
    unknown = tf.data.Dataset.range(1).filter(lambda row: row >= 0)
    assert synthetic.cut(unknown).cardinality() == 1


def test_datasets_of_a_program_are_short_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("batch", "padded_batch", "shuffle", "map"):
        monkeypatch.setattr(tf.data.Dataset, name, getattr(tf.data.Dataset, name))
    inside: list[str] = []
    synthetic.shorten_datasets(lambda: bool(inside))

    def first(rows: int) -> tf.Tensor:
        data = tf.data.Dataset.range(rows).shuffle(rows, seed=1)
        return next(iter(data.map(lambda x: 2 * x, num_parallel_calls=2).batch(rows)))

    assert first(40).numpy().tolist() == list(range(0, 2 * synthetic.BATCH, 2))
    inside.append("fit")
    assert sorted(first(40).numpy()) == list(range(0, 80, 2))
    assert first(40).numpy().tolist() != list(range(0, 80, 2))


def test_constants_of_a_program_are_replaced_in_place() -> None:
    source = "a = (\n    1,\n)\nclass C:\n    b = 2  # two\nc = a\n"
    found = public.with_constants(source, {"a": (3,), "b": "x", "other": 0})
    assert found == "a = (3,)\n\n\nclass C:\n    b = 'x'\nc = a\n"


def test_a_program_runs_by_the_random_numbers_of_keras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run(file: Path, place: str, *more: object) -> dict[str, np.ndarray]:
        seen.append(file.read_text())
        return {"error": np.array(["ValueError", "no data"])}

    monkeypatch.setattr(public, "_run", run)
    file = tmp_path / "nnclr.py"
    file.write_text("x = tf.random.uniform((3,)) + tf.random.normal((3,))\n")
    for name in ("nnclr", "nnclr_by_keras_random"):
        public.verdicts(name, file, ["mirrored-2"], tmp_path, 1)
    assert seen[0] == "x = tf.random.uniform((3,)) + tf.random.normal((3,))\n"
    assert seen[1] == "x = keras.random.uniform((3,)) + keras.random.normal((3,))\n"
    assert PUBLIC["nnclr_by_keras_random"] == PUBLIC["nnclr"]


def test_a_program_computes_in_another_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run(file: Path, place: str, folder: Path, limit_s: int, floatx: str) -> dict[str, Any]:
        seen.append((file.read_text(), floatx))
        return {"error": np.array(["ValueError", "no data"])}

    monkeypatch.setattr(public, "_run", run)
    file = tmp_path / "vae.py"
    file.write_text("x = tf.cast(x, tf.float32)\n")
    public.verdicts("vae", file, ["mirrored-2"], tmp_path, 1, "float64")
    assert seen == [("x = tf.cast(x, tf.float64)\n", "float64")]


def test_floats_of_tensorflow_are_those_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("eye", "one_hot", "ones", "zeros"):
        monkeypatch.setattr(tf, name, getattr(tf, name))
    synthetic.give_floats_of("float64")
    assert tf.eye(2).dtype == tf.one_hot([1], 2).dtype == tf.float64
    assert tf.zeros([2]).dtype == tf.float64
    assert tf.ones([2], tf.float32).dtype == tf.float32


@pytest.mark.parametrize("built", [True, False])
def test_a_model_that_keras_cannot_save_is_not_saved(built: bool) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    if built:
        model.build((None, 1))
    callbacks = [keras.callbacks.ModelCheckpoint("x.keras"), keras.callbacks.TerminateOnNaN()]
    found = public._shortened(keras.Model.fit, model, (), {"callbacks": callbacks})
    assert found["callbacks"] == (callbacks if built else callbacks[1:])
    assert not public._shortened(keras.Model.fit, model, (), {}).get("callbacks")


def test_an_optimizer_that_makes_no_step_is_not_compared() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.other = keras.optimizers.SGD()
    model.compile(loss="mse")
    history = model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    model.other.build(model.trainable_variables)
    slots = [name for name in public._left_by(model, history, 0) if "/slot/" in name]
    assert slots
    assert not [name for name in slots if "/slot/other/" in name]


def test_files_stay_when_another_worker_has_written_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def fill(made: Path) -> None:
        made.mkdir()
        (made / "file").write_text("mine")
        Path("target").mkdir()
        Path("target", "file").write_text("the other's")

    downloads._unpack(Path("target"), fill)
    downloads._unpack(Path("target"), fill)
    assert [file.name for file in tmp_path.iterdir()] == ["target"]
    assert Path("target", "file").read_text() == "the other's"


def test_files_of_all_kinds_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, fill in downloads._UNPACKED.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        downloads._unpack(Path(name), fill)
    assert len(list(Path("aclImdb/train/pos").iterdir())) == 20
    captions = Path("Flickr8k.token.txt").read_text().splitlines()
    assert len(captions) == 5 * downloads.IMAGES
    image = tf.io.decode_jpeg(Path("home/.keras/left/000.jpg").read_bytes())
    assert image.shape == (60, 50, 3)
    assert tf.io.decode_png(Path("lol_dataset/eval15/low/000.png").read_bytes()).shape[0] == 64
    payments = Path("creditcard.csv").read_text().splitlines()[1:]
    assert {len(line.split(",")) for line in payments} == {31}
    get_file = downloads._get_file(tmp_path)
    (tmp_path / "aclImdb").rename(tmp_path / "unpacked")
    for origin, made in {
        "aclImdb_v1.tar.gz": "aclImdb/test/neg/0.txt",
        "fra-eng.zip": "fra.txt",
        "mnist_test_seq.npy": "mnist_test_seq.npy",
        "PeMSD7_Full.zip": "PeMSD7_W_228.csv",
    }.items():
        assert Path(get_file(origin=f"http://x/{origin}")).parent.joinpath(made).exists()
    assert {len(column) for column in downloads._patients().values()} == {300}
    assert np.diff(downloads._series()["timestamp"]).min() > np.timedelta64(0)
    pairs = Path(get_file("spa-eng.zip", "http://x/spa-eng.zip")).parent / "spa-eng/spa.txt"
    assert all(line.count("\t") == 1 for line in pairs.read_text().splitlines())
    with pytest.raises(RuntimeError, match=r"no synthetic data for http://x/unknown\.zip"):
        get_file("unknown.zip", "http://x/unknown.zip")


def test_synthetic_sets_have_any_split() -> None:
    found, info = stand_ins._load("cycle_gan/horse2zebra", with_info=True, as_supervised=True)
    assert info.splits["train"].num_examples == len(found["trainA"])
    (part,) = stand_ins._load("stl10", split=["unlabelled"])
    assert part.element_spec["image"].shape == (96, 96, 3)
    sentences = stand_ins._load_tagged_sentences("conll2003")["train"]
    assert sentences[0]["tokens"] == sentences["tokens"][0]
    assert [len(words) for words in sentences["tokens"]] == [len(r["ner_tags"]) for r in sentences]


def test_commands_of_a_notebook_are_left_out() -> None:
    assert public._without_magic("!pip install x\nx = 1\n  %time x") == "x = 1"


def test_an_error_is_one_line_of_the_table() -> None:
    error = np.array(["ModelError", "first\n\n a | b \n"])
    assert public._line(error) == "ModelError: a / b"


@pytest.mark.parametrize(
    ("words", "short"),
    [
        ("equal (fit_0/w/1 differs by 1.51e-06, allowed 5.33e-05)", "equal (2e-6; 5e-5 allowed)"),
        ("equal (fit_0/w/1 differs by 2.00e-07, allowed 1.00e-06)", "equal (2e-7)"),
        ("fit_0/w/1 differs by 3.4e-05, allowed 1.00e-06", "3e-5; 1e-6 allowed"),
        ("equal (fit_0/w/1 differs by 1.51e+00, allowed 2.5e+01)", "equal (2; 2e+1 allowed)"),
        ("fit_0/w/1 differs by inf, allowed 1.00e-06", "inf; 1e-6 allowed"),
        ("refused: ModelError: no", "refused: ModelError: no"),
    ],
)
def test_the_table_of_a_page_is_short(words: str, short: str) -> None:
    assert public.in_short(words) == short


def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    found = public.verdicts("vae", tmp_path / "vae.py", ["mirrored-2"], tmp_path, 1)
    assert found == ["cannot run here: not in this checkout"]


def test_a_program_that_fails_alone_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = {"error": np.array(["ValueError", "no data"])}
    monkeypatch.setattr(public, "_run", lambda *args: error)
    (tmp_path / "vae.py").touch()
    found = public.verdicts("vae", tmp_path / "vae.py", ["mirrored-2"], tmp_path, 1)
    assert found == ["cannot run here: ValueError: no data"]


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.0, "equal (fit_0/weight/0 differs by 0.00e+00"), (2.0, "fit_0/weight/0")],
)
def test_differences_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, words: str
) -> None:
    def run(file: Path, place: str, *more: object) -> dict[str, np.ndarray]:
        return {"fit_0/weight/0": np.array([value if place == "mirrored-2" else 1.0])}

    monkeypatch.setattr(public, "_run", run)
    (tmp_path / "vae.py").touch()
    (found,) = public.verdicts("vae", tmp_path / "vae.py", ["mirrored-2"], tmp_path, 1)
    assert found.startswith(words)


def test_the_public_programs_are_many() -> None:
    assert len(PUBLIC) >= 20
    assert {root for root, _ in PUBLIC.values()} == {"keras_io", "tensorflow_docs"}
