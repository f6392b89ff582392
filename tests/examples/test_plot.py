"""Figures of records."""

import json
from pathlib import Path

import pytest

from benchmarks import plot
from examples.options import UserError


def test_runs_of_other_tokenizers_are_drawn_in_bits_per_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    pyplot = plot.pyplot()
    monkeypatch.setattr(
        pyplot.Axes, "set", lambda self, **named: labels.append(named["ylabel"])
    )
    record = {"kind": "eval", "optimizer": "muon", "step": 1, "tokens": 8, "seconds": 1}
    for name, bits in (("bytes", 3.0), ("bpe", 1.5), ("also_bpe", 1.5)):
        (tmp_path / name).mkdir()
        line = json.dumps(record | {"loss": 2.0, "bits_per_byte": bits}) + "\n"
        (tmp_path / name / "metrics.jsonl").write_text(line)
    for names, unit in (
        (["bytes", "bpe"], "bits per byte"),
        (["bpe", "also_bpe"], "nats"),
    ):
        labels.clear()
        folders = [tmp_path / name for name in names]
        plot.plot_runs(folders, tmp_path / "a.png")
        assert labels[0].startswith(unit) and labels[2] == "nats per token"


@pytest.mark.parametrize("name", ["curves.tga", "curves", "."])
def test_a_figure_needs_the_name_of_one(name: str, tmp_path: Path) -> None:
    figure = plot.pyplot().figure()
    with pytest.raises(UserError, match="does not end as that of a figure"):
        plot.save(figure, tmp_path / name)
    assert not list(tmp_path.iterdir()) and not tmp_path.with_suffix(".png").exists()
